"""`learner.early_groups`: what is trained before the batch is full changes no weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.checks.rules.learner import early_groups, why_not_early
from asyncrl.learner.step.gradients import UNDIVIDED
from asyncrl.losses import Denominators, policy_loss, preset
from asyncrl.losses.aggregate import divisor
from asyncrl.schema import AdvantageConfig, Config, LearnerConfig
from asyncrl.settings.loss.rules import AGGREGATIONS
from tests.learner.alone import train_alone
from tests.learner.fed_replay import FedReplay, KeptRows, KeptWeights, largest_difference
from tests.learner.smooth_steps import EQUAL, MAKER, RATE, apart, make_smooth_optimizer
from tests.learner.step.early_replay import EarlyReplay
from tests.learner.tiny_config import tiny_config
from tests.losses.batches import random_batch, to_inputs


def make_config(folder: Path, name: str, **learner: Any) -> Config:
    settings = {"steps": 2, "lr": 1e-3, "save_every": 0, "groups_per_step": 8, "early_groups": 2}
    return tiny_config(folder, name, learner=settings | learner)


def run(config: Config, replay: FedReplay) -> tuple[KeptWeights, KeptRows]:
    publisher = KeptWeights()
    return publisher, train_alone(config, replay, publisher)[1]


OF_TIME = ("time/", "perf/", "idle/", "checkpoint/", "step/early_groups")


@pytest.mark.parametrize("changes", [{}, {"updates_per_batch": 2, "epochs_per_batch": 2, "early_groups": 1}], ids=str)
def test_weights_and_numbers_are_the_same_bits_whenever_the_groups_came(tmp_path: Path, changes: dict[str, int]):
    ends = []
    for parts in (0, 3):
        config = make_config(tmp_path, f"parts{parts}", **changes)
        together, updates = config.learner.early_groups, config.learner.updates_per_batch
        replay = EarlyReplay(parts, together=together, updates=updates)
        publisher, rows = run(config, replay)
        assert [row["step/early_groups"] for row in rows.rows] == [parts * together] * 2
        assert all(("time/early" in row) == (parts > 0) for row in rows.rows)
        ends.append((publisher.newest, [{k: v for k, v in r.items() if not k.startswith(OF_TIME)} for r in rows.rows]))
    for weights, rows in ends[1:]:
        assert largest_difference(ends[0][0], weights) == 0.0
        assert rows == ends[0][1]


def test_only_rounding_differs_from_whole_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(MAKER, make_smooth_optimizer)
    whole, told = run(make_config(tmp_path, "whole", early_groups=0, lr=RATE), FedReplay(groups=8))
    early, rows = run(make_config(tmp_path, "early", lr=RATE), EarlyReplay(3, together=2))
    assert apart(whole.newest, early.newest, whole.first) < EQUAL
    for name in ("loss/total", "loss/policy", "optim/grad_norm", "reward/mean", "advantage/std"):
        assert rows.rows[0][name] == pytest.approx(told.rows[0][name], rel=1e-4, abs=1e-6), name


def test_a_batch_that_begins_otherwise_is_computed_anew(tmp_path: Path):
    """Of step 1 the groups come in another order than was said: what it was begun with is no part of the weights."""
    straight, _ = run(make_config(tmp_path, "straight"), EarlyReplay(0, together=2, swapped=(1,)))
    begun, rows = run(make_config(tmp_path, "begun"), EarlyReplay(2, together=2, swapped=(1,)))
    assert [row["step/early_groups"] for row in rows.rows] == [4, 0]
    assert largest_difference(straight.newest, begun.newest) == 0.0


def test_advantages_that_the_whole_batch_changes_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(AdvantageConfig, "within_groups", True)  # what nobody may say of those over the batch
    ends = []
    for parts in (0, 2):
        config = make_config(tmp_path, f"parts{parts}")
        config.advantage = AdvantageConfig(std="batch")
        publisher, rows = run(config, EarlyReplay(parts, together=2))
        assert [row["step/early_groups"] for row in rows.rows] == [0, 0]
        ends.append(publisher.newest)
    assert largest_difference(*ends) == 0.0


def test_asked_to_stop_in_the_middle_of_a_batch_it_ends_without_it(tmp_path: Path):
    replay = EarlyReplay(3, together=2)
    publisher = KeptWeights()
    train_alone(make_config(tmp_path, "run"), replay, publisher, asked=lambda: replay.given.get(1, 0) >= 1)
    replay.let_go()
    assert replay.named("trained") == [(0, 1)] and replay.named("commit") == [0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"loss.preset": "m2po_paper"}, "looks at all tokens"),
        ({"loss.sat_quantile": 0.9}, "looks at all tokens"),
        ({"advantage.std": "batch"}, "not of each group alone"),
        ({"advantage.kl_coef": 0.1}, "not of each group alone"),
        ({"advantage.estimator": "gae"}, "not of each group alone"),
        ({"advantage.estimator": "reinforce_pp"}, "not of each group alone"),
        ({"replay.order": "freshest"}, "replay.order=freshest"),
        ({"replay.window": 3}, "replay.window=3"),
        ({"replay.stale_policy": "wait"}, "stale_policy=wait"),
    ],
    ids=str,
)
def test_it_is_off_where_all_of_a_batch_has_to_be_there(changes: dict[str, Any], why: str):
    config = Config(learner=LearnerConfig(early_groups=2))
    config.loss.preset = "ppo"
    for key, value in changes.items():
        room, name = key.split(".")
        setattr(getattr(config, room), name, value)
    assert early_groups(config) == (0 if why else 2)
    assert why in why_not_early(config) and bool(why) == bool(why_not_early(config))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(("ppo", {"aggregation": mode}) for mode in AGGREGATIONS if mode != "constant"),
        ("ppo", {"aggregation": "constant", "constant_length": 7.0}),
        ("gspo", {"kl_coef": 0.1, "behavior_kl": 0.01}),
        ("cispo", {"kl_coef": 0.1}),
    ],
    ids=str,
)
def test_gradients_divided_at_the_end_are_those_of_the_loss(name: str, changes: dict[str, Any]):
    config, counts, found = preset(name, **changes), Denominators(tokens=37.0, sequences=11.0, groups=5.0), []
    for denominators in (counts, UNDIVIDED):
        inputs = to_inputs(random_batch(1), ref=True)
        loss = policy_loss(inputs, config, denominators).loss
        found.append((loss, *torch.autograd.grad(loss, inputs.learner_logprobs)))
    for divided, undivided in zip(*found, strict=True):
        assert divided.abs().max() > 0
        torch.testing.assert_close(undivided / divisor(config, counts), divided, rtol=1e-12, atol=0)
