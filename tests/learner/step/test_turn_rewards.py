"""Rewards of turns in advantages and value targets, against sums written from the formulas, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.errors import RewardError
from asyncrl.learner.batch.micro_batch import MicroBatch
from asyncrl.learner.batch.plan import Member
from asyncrl.learner.reporting.samples import Samples
from asyncrl.learner.step.metrics import plan_metrics
from asyncrl.learner.step.targets import with_targets
from asyncrl.replay.protocol import Lease
from asyncrl.schema import AdvantageConfig
from tests.learner.feed import make_step, turned_step
from tests.learner.step.test_targets import CPU, Tokens, carried, scored, unpacked

GAE = AdvantageConfig(estimator="gae", baseline="none", std="none", gamma=0.9, lam=0.8)
RETURNS = AdvantageConfig(estimator="reinforce_pp", baseline="none", std="batch", gamma=0.9)
SETTINGS = {
    "turns": AdvantageConfig(estimator="turns", std="group", gamma=0.4),
    "turns_undivided": AdvantageConfig(estimator="turns"),
    "turns_alone": AdvantageConfig(estimator="turns", baseline="none", gamma=0.9),
    "turns_by_number": AdvantageConfig(estimator="turns_by_number", std="group", gamma=0.7),
}


def numbers(lease: Lease, member: Member) -> np.ndarray:
    """Which turn each trained token of a trajectory is of, from its whole loss mask."""
    whole = lease.trajectories[member]
    begins = whole.loss_mask & ~np.r_[False, whole.loss_mask[:-1]]
    of_all = np.cumsum(begins) - 1
    ages = np.array([lease.plan.staleness.get(version, 0) for version in whole.policy_versions.tolist()])
    return of_all[whole.loss_mask & (ages <= lease.plan.max_staleness)]


def earned(lease: Lease, g: int, t: int) -> np.ndarray:
    header = lease.plan.groups[g].trajectories[t]
    values = np.array(header.turn_rewards)
    values[-1] += header.reward - values.sum()
    return values


def by_turn(lease: Lease, config: AdvantageConfig) -> dict[Member, np.ndarray]:
    """The advantage of each turn of each trajectory."""
    found: dict[Member, np.ndarray] = {}
    for g, group in enumerate(lease.plan.groups):
        returns = {}
        for t in range(len(group.trajectories)):
            r = earned(lease, g, t)
            returns[t] = np.array(
                [sum(config.gamma ** (j - k) * r[j] for j in range(k, len(r))) for k in range(len(r))]
            )
        for t, mine in returns.items():
            values = []
            for k, value in enumerate(mine):
                peers = (
                    [each[k] for each in returns.values() if len(each) > k]
                    if config.estimator == "turns_by_number"
                    else np.concatenate(list(returns.values()))
                )
                centre = np.mean(peers) if config.baseline == "mean" else 0.0
                scale = (np.std(peers, ddof=1) if len(peers) > 1 else 0.0) + 1e-6 if config.std == "group" else 1.0
                values.append((value - centre) / scale)
            found[g, t] = np.array(values)
    return found


def by_token(lease: Lease, tokens: Tokens) -> dict[Member, np.ndarray]:
    """What each trained token earned: a turn's reward is at its last token."""
    found = {}
    for g, t in tokens:
        header, number = lease.plan.groups[g].trajectories[t], numbers(lease, (g, t))
        found[g, t] = np.zeros(len(number))
        if not header.turn_rewards:
            found[g, t][-1] = header.reward
            continue
        for place in range(len(number)):
            if place + 1 == len(number) or number[place + 1] != number[place]:
                found[g, t][place] = earned(lease, g, t)[number[place]]
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SETTINGS)
def test_every_token_of_a_turn_has_the_advantage_of_its_turn(name: str, seed: int) -> None:
    lease = turned_step(seed)
    for budget in (30, 10_000):
        tokens = unpacked(with_targets(lease.plan, scored(lease, budget), SETTINGS[name], 0.0, CPU)[0])
        expected = by_turn(lease, SETTINGS[name])
        assert any(numbers(lease, member)[0] > 0 for member in tokens), "some first turns are too old to be trained"
        for member, arrays in tokens.items():
            np.testing.assert_allclose(arrays["advantages"], expected[member][numbers(lease, member)], atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_gae_gets_each_turn_s_reward_at_its_last_token(seed: int) -> None:
    lease = turned_step(seed, told=0.6)
    tokens = unpacked(with_targets(lease.plan, scored(lease, 80), GAE, 0.0, CPU)[0])
    assert {bool(lease.plan.groups[g].trajectories[t].turn_rewards) for g, t in tokens} == {True, False}
    for member, r in by_token(lease, tokens).items():
        values = tokens[member]["values"].astype(np.float64)
        deltas = r + GAE.gamma * np.append(values[1:], 0.0) - values
        expected = carried(np.full(len(r), GAE.lam), deltas, GAE.gamma)
        np.testing.assert_allclose(tokens[member]["advantages"], expected, atol=1e-5)
        np.testing.assert_allclose(tokens[member]["value_targets"], expected + values, atol=1e-5)


def test_returns_to_go_of_a_token_hold_the_rewards_of_its_turn_and_the_later_ones() -> None:
    lease = turned_step(4)
    tokens = unpacked(with_targets(lease.plan, scored(lease, 80), RETURNS, 0.0, CPU)[0])
    returns = {m: carried(np.ones(len(r)), r, RETURNS.gamma) for m, r in by_token(lease, tokens).items()}
    flat = np.concatenate(list(returns.values()))
    for member, values in returns.items():
        np.testing.assert_allclose(tokens[member]["advantages"], (values - flat.mean()) / flat.std(), atol=1e-5)


@pytest.mark.parametrize("config", [GAE, RETURNS, AdvantageConfig(std="group")])
def test_all_of_the_reward_at_the_last_turn_is_the_same_as_no_word_of_turns(config: AdvantageConfig) -> None:
    told = turned_step(1)
    zeros = lambda header: replace(header, turn_rewards=(0.0,) * len(header.turn_rewards))  # noqa: E731
    none = lambda header: replace(header, turn_rewards=())  # noqa: E731
    found = []
    for change in (zeros, none):
        groups = tuple(replace(g, trajectories=tuple(map(change, g.trajectories))) for g in told.plan.groups)
        lease = replace(told, plan=replace(told.plan, groups=groups))
        found.append(unpacked(with_targets(lease.plan, scored(lease, 80), config, 0.0, CPU)[0]))
    for member, arrays in found[0].items():
        assert np.array_equal(arrays["advantages"], found[1][member]["advantages"])


def test_a_trajectory_that_does_not_say_what_its_turns_earned_is_never_taken_for_zero() -> None:
    lease = turned_step(0, told=0.5)
    with pytest.raises(RewardError, match="needs the reward of each turn"):
        with_targets(lease.plan, scored(lease, 80), SETTINGS["turns"], 0.0, CPU)


def test_a_rank_without_tokens_joins_with_nothing() -> None:
    lease = turned_step(0)
    none: list[MicroBatch] = []
    for config in (*SETTINGS.values(), GAE, RETURNS):
        assert with_targets(lease.plan, none, config, 0.0, CPU)[1].spreads["advantage/"] == (0.0, 0.0, 0.0)


def test_metrics_and_samples_say_what_turns_earned_where_somebody_did() -> None:
    lease = turned_step(3)
    row = plan_metrics(lease.plan)
    each = [earned(lease, g, t) for g, group in enumerate(lease.plan.groups) for t in range(len(group.trajectories))]
    assert row["reward/turns"] == pytest.approx(np.mean([len(turns) for turns in each]))
    assert row["reward/turn_mean"] == pytest.approx(np.concatenate(each).mean())
    assert row["reward/turn_std"] == pytest.approx(np.concatenate(each).std())
    plan, groups = make_step(3)
    assert not any("turn" in name for name in plan_metrics(plan))
    assert not any("turn_rewards" in row for row in Samples("none").rows(plan, groups, 3))
