"""A metric combines over micro-batches, updates and ranks as it says itself, whatever it is called."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from asyncrl.learner.step.metrics import Measured, MicroBatchMetrics, plan_histograms, plan_metrics
from asyncrl.losses.diagnostics import Sums
from tests.learner.feed import make_step


def test_each_kind_of_number_combines_in_its_own_way_and_none_by_its_name() -> None:
    def rank(number: int) -> Measured:
        mine = Measured()
        for update in (1, 2):
            mine.add(
                Measured(
                    ratios={"loss/a": (float(number), 2.0)},
                    maxima={"loss/b": float(10 * number + update)},
                    totals={"loss/c": 1.0},
                    per_update={"d": float(update)},
                    updates=float(number == 0),
                )
            )
        return mine

    together = Measured()
    for number in (0, 1):
        together.add(rank(number))
    row = together.row()
    assert row["loss/a"] == pytest.approx(2 / 8)
    assert row["loss/b"] == 12
    assert row["loss/c"] == 4, "a total stays one under a name like a loss"
    assert row["d"] == pytest.approx((1 + 2) * 2 / 2), "added up over ranks, its mean over two updates"


def test_a_spread_is_that_of_all_tokens_together() -> None:
    values = torch.tensor([1.0, -2.0, 0.5, 7.0, 7.0], dtype=torch.float64)
    together = Measured()
    for part in (values[:2], values[2:], values[:0]):
        moments = float(part.sum()), float(part.square().sum()), float(len(part))
        together.add(Measured(spreads={"anything/": moments}))
    row = together.row()
    assert row["anything/mean"] == pytest.approx(values.mean().item())
    assert row["anything/std"] == pytest.approx(values.std(correction=0).item())
    assert Measured(spreads={"none/": (0.0, 0.0, 0.0)}).row() == {"none/mean": 0.0, "none/std": 0.0}


def test_the_explained_variance_is_one_minus_that_of_the_residual() -> None:
    spreads = {"critic/target_": (0.0, 8.0, 2.0), "critic/residual_": (0.0, 2.0, 2.0)}
    assert Measured(spreads=spreads).row()["critic/explained_variance"] == pytest.approx(0.75)
    alike = dict.fromkeys(spreads, (2.0, 2.0, 2.0))
    assert "critic/explained_variance" not in Measured(spreads=alike).row()


def test_scalars_of_a_micro_batch_keep_their_kind_and_an_unused_name_is_absent() -> None:
    one = torch.tensor(1.0)
    made = Measured.of(MicroBatchMetrics(Sums(means={"r": (one, 2 * one)}, maxima={"m": 3 * one}), {"p": 4 * one}))
    assert (made.ratios, made.maxima, made.per_update) == ({"r": (1.0, 2.0)}, {"m": 3.0}, {"p": 4.0})
    assert not Measured.of(MicroBatchMetrics(Sums())).row() and math.isfinite(made.row()["p"])


def test_histograms_hold_every_episode_trajectory_and_token_of_a_batch() -> None:
    plan, _ = make_step(3)
    found, row = plan_histograms(plan), plan_metrics(plan)
    trajectories = [trajectory for group in plan.groups for trajectory in group.trajectories]
    for name, values in (
        ("histogram/reward", [trajectory.reward for trajectory in trajectories]),
        ("histogram/completion/length", [float(trajectory.loss_tokens) for trajectory in trajectories]),
    ):
        edges, counts = found[name]
        assert len(edges) == len(counts) + 1 and sum(counts) == len(values)
        assert (edges[0], edges[-1]) == (min(values), max(values)) or min(values) == max(values)
    edges, counts = found["histogram/staleness"]
    tokens = sum(counts)
    shares = {f"staleness/hist_{age}": count / tokens for age, count in enumerate(counts) if count}
    assert shares == {name: value for name, value in row.items() if name.startswith("staleness/hist_")}
    assert edges[0] == -0.5 and len(edges) == len(counts) + 1


@pytest.mark.parametrize("rewards", [(0.3, 0.1 + 0.2), (1e16, 1e16 + 2), (1e17, 1e17), (-9e299, 9e299), (0.0, 0.0)])
def test_rewards_of_any_size_and_nearness_have_a_histogram(rewards: tuple[float, float]) -> None:
    plan, _ = make_step(0)
    headers = itertools.cycle(rewards)
    groups = tuple(
        replace(group, trajectories=tuple(replace(each, reward=next(headers)) for each in group.trajectories))
        for group in plan.groups
    )
    edges, counts = plan_histograms(replace(plan, groups=groups))["histogram/reward"]
    assert sum(counts) == sum(len(group.trajectories) for group in groups)
    assert edges[0] <= min(rewards) <= max(rewards) <= edges[-1] and sorted(set(edges)) == edges


def test_ages_of_any_number_have_few_bins() -> None:
    plan, _ = make_step(0)
    old = replace(plan, staleness={version: age + 1000 for version, age in plan.staleness.items()}, max_staleness=2000)
    edges, counts = plan_histograms(old)["histogram/staleness"]
    assert len(edges) == len(counts) + 1 <= 512 and sum(counts) == sum(old.tokens_by_staleness().values()) > 0
    assert edges[-1] > 1000
