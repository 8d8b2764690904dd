"""Advantages and value targets of a step, against numpy written from the formulas, and over any split of the step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.balance import shard_step
from asyncrl.errors import RewardError
from asyncrl.learner.batch.micro_batch import MicroBatch, pack
from asyncrl.learner.batch.plan import Budget, Member, plan_minibatches
from asyncrl.learner.step.targets import with_targets
from asyncrl.replay.protocol import Lease
from asyncrl.schema import AdvantageConfig
from asyncrl.types import GREEDY_REWARD, Trajectory
from tests.learner.feed import make_lease, make_step

CPU = torch.device("cpu")
KL_COEF = 0.1
SETTINGS = {
    "grpo": AdvantageConfig(std="group"),
    "opo": AdvantageConfig(baseline="opo"),
    "remax": AdvantageConfig(baseline="greedy"),
    "remax_priced": AdvantageConfig(baseline="greedy", kl_coef=KL_COEF),
    "gdpo": AdvantageConfig(estimator="gdpo", std="group", components={"short": 0.5, GREEDY_REWARD: -2.0}),
    "group_priced": AdvantageConfig(kl_coef=KL_COEF),
    "reinforce_pp": AdvantageConfig(estimator="reinforce_pp", baseline="none", std="batch", gamma=0.9, kl_coef=KL_COEF),
    "reinforce_pp_baseline": AdvantageConfig(estimator="reinforce_pp", std="batch", kl_coef=KL_COEF),
    "gae": AdvantageConfig(estimator="gae", baseline="none", std="none", gamma=0.9, lam=0.8, kl_coef=KL_COEF),
    "gae_whitened": AdvantageConfig(estimator="gae", baseline="none", std="batch"),
    "vtrace": AdvantageConfig(estimator="vtrace", baseline="none", std="none", gamma=0.9, lam=0.8),
    "vtrace_turns": AdvantageConfig(estimator="vtrace_turns", baseline="none", std="none", lam=0.8),
    "retrace": AdvantageConfig(estimator="retrace", baseline="none", std="none", gamma=0.9, lam=0.8, c_bar=1.5),
    "retrace_turns": AdvantageConfig(estimator="retrace_turns", baseline="none", std="batch", lam=0.8),
    "vapo": AdvantageConfig(estimator="gae", baseline="none", std="none", gamma=0.9, lam=1.0, lam_alpha=0.4),
    "retrace_vapo": AdvantageConfig(estimator="retrace", baseline="none", std="none", lam=0.9, lam_alpha=0.4),
}

Tokens = dict[Member, dict[str, np.ndarray]]
"""Per trajectory, arrays over its fresh loss tokens."""


def noise(name: str, member: Member, tokens: int) -> np.ndarray:
    """The same for a trajectory however it is packed."""
    return np.random.default_rng([len(name), *member]).normal(-1.0, 0.5, tokens)


def scored(lease: Lease, budget: int) -> list[MicroBatch]:
    """Packed, with made-up scores under the policy, the reference and the critic."""
    batches = []
    for minibatch in plan_minibatches(
        lease.plan, rank=0, updates=1, budget=Budget(tokens=budget, attention=4 * budget)
    ):
        for members in minibatch.micro_batches:
            batch = pack(lease, members, CPU)
            scores = {
                name: torch.full((len(batch.input_ids),), 7.0)
                for name in ("current_logprobs", "ref_logprobs", "values")
            }
            for i, member in enumerate(members):
                mine = (batch.sequence_ids == i) & batch.loss_mask
                for name, values in scores.items():
                    values[mine] = torch.from_numpy(noise(name, member, int(mine.sum()))).float()
            batches.append(replace(batch, **scores))
    return batches


def unpacked(batches: list[MicroBatch]) -> Tokens:
    found: Tokens = {}
    for batch in batches:
        for i, member in enumerate(batch.members):
            mine = (batch.sequence_ids == i) & batch.loss_mask
            found[member] = {
                name: tensor[mine].numpy() for name, tensor in batch.tensors().items() if len(tensor) == len(mine)
            }
    return found


def targets_of(name: str, seed: int, budget: int = 80) -> tuple[Lease, Tokens]:
    plan, groups = make_step(seed, groups=5, observed=SETTINGS[name].by_turn)
    lease = make_lease(plan, groups)
    batches, _ = with_targets(plan, scored(lease, budget), SETTINGS[name], KL_COEF, CPU)
    return lease, unpacked(batches)


def rewards_of(lease: Lease, config: AdvantageConfig, tokens: Tokens) -> dict[Member, np.ndarray]:
    """The reward at the last token, minus the price of the KL at each."""
    rewards = {}
    for member, arrays in tokens.items():
        gap = arrays["current_logprobs"].astype(np.float64) - arrays["ref_logprobs"]
        rewards[member] = -config.kl_coef * gap
        rewards[member][-1] += lease.plan.groups[member[0]].trajectories[member[1]].reward
    return rewards


def against_group(lease: Lease, config: AdvantageConfig, tokens: Tokens) -> dict[Member, float]:
    earned = rewards_of(lease, config, tokens)
    found = {}
    for g, group in enumerate(lease.plan.groups):
        # Over-age tokens pay the price of the trajectory's fresh ones, over-age trajectories their siblings' mean.
        paid = {
            t: (earned[g, t].sum() - header.reward) / len(earned[g, t]) * header.loss_tokens
            for t, header in enumerate(group.trajectories)
            if (g, t) in earned
        }
        others = np.mean(list(paid.values())) if paid else 0.0
        scores = np.array([header.reward + paid.get(t, others) for t, header in enumerate(group.trajectories)])
        lengths = np.array([header.loss_tokens for header in group.trajectories])
        baseline = (scores * lengths).sum() / lengths.sum() if config.baseline == "opo" else scores.mean()
        scale = scores.std(ddof=1) + 1e-6 if config.std == "group" else 1.0
        found |= {(g, t): (score - baseline) / scale for t, score in enumerate(scores)}
    return found


def fresh_step(seed: int) -> Lease:
    """Without a token that is too old."""
    plan, groups = make_step(seed, groups=4, max_staleness=99)
    return make_lease(plan, groups)


def branched(lease: Lease, copies: int) -> Lease:
    """The first trajectory of each group once more, `copies` times, as its branches."""
    groups, trajectories = [], dict[Member, Trajectory]()
    for g, group in enumerate(lease.plan.groups):
        places = [0] * (copies + 1) + list(range(1, len(group.trajectories)))
        branches = [0 < at <= copies for at in range(len(places))]
        headers = [replace(group.trajectories[t], branch=branch) for t, branch in zip(places, branches, strict=True)]
        groups.append(replace(group, trajectories=tuple(headers)))
        trajectories |= {(g, at): lease.trajectories[g, t] for at, t in enumerate(places)}
    plan = replace(lease.plan, groups=tuple(groups))
    return replace(lease, plan=replace(plan, shards=shard_step(plan, 1)), trajectories=trajectories)


@pytest.mark.parametrize("name", ["grpo", "gdpo", "reinforce_pp_baseline"])
def test_branches_share_the_advantage_of_their_episode_and_move_nobody_else_s(name: str) -> None:
    lease = fresh_step(3)
    config = replace(SETTINGS[name], kl_coef=0.0, std="group" if name == "grpo" else "none")
    many = branched(lease, 3)
    before, after = (
        unpacked(with_targets(each.plan, scored(each, 4000), config, 0.0, CPU)[0]) for each in (lease, many)
    )
    assert len(after) > len(before)
    for (g, t), arrays in before.items():
        for place in range(4) if t == 0 else (t + 3,):
            np.testing.assert_array_equal(after[g, place]["advantages"], arrays["advantages"])


def test_an_episode_pays_for_the_kl_of_all_its_branches() -> None:
    many = branched(fresh_step(3), 1)
    config = AdvantageConfig(baseline="none", kl_coef=KL_COEF)
    tokens = unpacked(with_targets(many.plan, scored(many, 4000), config, KL_COEF, CPU)[0])
    for (g, t), arrays in tokens.items():
        conversations = [(g, 0), (g, 1)] if t < 2 else [(g, t)]
        paid = sum(
            KL_COEF * float((tokens[each]["current_logprobs"] - tokens[each]["ref_logprobs"]).sum())
            for each in conversations
        )
        expected = many.plan.groups[g].trajectories[t].reward - paid
        np.testing.assert_allclose(arrays["advantages"], expected, rtol=1e-4, atol=1e-5)


def against_greedy(lease: Lease, config: AdvantageConfig, tokens: Tokens) -> dict[Member, np.ndarray]:
    """A_t = sum of the rewards from t on - the greedy reward, each token paying for its own KL and that to go."""
    found = {}
    for (g, t), rewards in rewards_of(lease, config, tokens).items():
        greedy = lease.plan.groups[g].trajectories[t].rewards[GREEDY_REWARD]
        found[g, t] = np.array([rewards[u:].sum() - greedy for u in range(len(rewards))])
    return found


def by_components(lease: Lease, config: AdvantageConfig) -> dict[Member, float]:
    """Over-age siblings and all: their rewards are known."""
    found: dict[Member, float] = {}
    for g, group in enumerate(lease.plan.groups):
        total = np.zeros(len(group.trajectories))
        for name, weight in config.components.items():
            part = np.array([header.rewards[name] for header in group.trajectories])
            total += weight * (part - part.mean()) / (part.std(ddof=1) + 1e-6)
        found |= {(g, t): float(value) for t, value in enumerate(total)}
    everyone = np.array(list(found.values()))
    return {member: (value - everyone.mean()) / (everyone.std(ddof=1) + 1e-6) for member, value in found.items()}


def ratios_of(config: AdvantageConfig, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """learner/behavior of each token, and that which cuts the trace there: the token's, or the mean one of its turn."""
    if not config.uses_ratio:
        return np.ones(len(arrays["values"])), np.ones(len(arrays["values"]))
    logs = arrays["current_logprobs"].astype(np.float64) - arrays["behavior_logprobs"]
    if not config.by_turn:
        return np.exp(logs), np.exp(logs)
    turn = np.cumsum(np.diff(arrays["position_ids"], prepend=-1) != 1)
    return np.exp(logs), np.exp([logs[turn == here].mean() for here in turn])


def carried(trace: np.ndarray, deltas: np.ndarray, gamma: float) -> np.ndarray:
    """sum over k >= t of gamma^(k - t) (trace_t ... trace_(k-1)) delta_k, for every t."""
    steps = range(len(deltas))
    return np.array([sum(gamma ** (k - t) * np.prod(trace[t:k]) * deltas[k] for k in steps[t:]) for t in steps])


def traced(lease: Lease, config: AdvantageConfig, tokens: Tokens) -> tuple[dict, dict]:
    """Advantages and value targets of V-trace, Retrace and GAE as the sums of the papers."""
    rewards, advantages, targets = rewards_of(lease, config, tokens), {}, {}
    for member, arrays in tokens.items():
        r, values = rewards[member], arrays["values"].astype(np.float64)
        ahead = np.append(values[1:], 0.0)
        deltas = r + config.gamma * ahead - values
        ratio, cut = ratios_of(config, arrays)
        c = np.minimum(config.c_bar, cut)
        if config.estimator.startswith("vtrace"):
            rho = np.minimum(1.0, ratio)
            targets[member] = values + carried(config.lam * c, rho * deltas, config.gamma)
            bootstrap = config.lam * np.append(targets[member][1:], 0.0) + (1 - config.lam) * ahead
            advantages[member] = rho * (r + config.gamma * bootstrap - values)
            continue
        lam = max(0.0, 1 - 1 / (config.lam_alpha * len(r))) if config.lam_alpha else config.lam
        behind = np.append(c[1:], 0.0)  # the token's own ratio is not in its advantage
        advantages[member] = carried(lam * behind, deltas, config.gamma)
        rho = np.minimum(config.c_bar, ratio)
        targets[member] = values + rho * carried(config.lam * behind, deltas, config.gamma)
    return advantages, targets


def whitened(advantages: dict[Member, np.ndarray]) -> dict[Member, np.ndarray]:
    flat = np.concatenate(list(advantages.values()))
    return {member: (values - flat.mean()) / flat.std() for member, values in advantages.items()}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SETTINGS)
def test_advantages_and_targets_are_those_of_the_formula(name: str, seed: int):
    lease, tokens = targets_of(name, seed)
    config, targets = SETTINGS[name], None
    if config.baseline == "greedy":
        expected = against_greedy(lease, config, tokens)
    elif config.estimator == "group" or name == "reinforce_pp_baseline":
        scores = against_group(lease, config, tokens)
        expected = {member: np.full(len(arrays["advantages"]), scores[member]) for member, arrays in tokens.items()}
    elif config.estimator == "gdpo":
        scores = by_components(lease, config)
        expected = {member: np.full(len(arrays["advantages"]), scores[member]) for member, arrays in tokens.items()}
    elif config.estimator == "reinforce_pp":
        rewards = rewards_of(lease, config, tokens)
        expected = {member: carried(np.ones(len(r)), r, config.gamma) for member, r in rewards.items()}
    else:
        expected, targets = traced(lease, config, tokens)
    if config.estimator != "group" and config.std == "batch":
        expected = whitened(expected)
    for member, arrays in tokens.items():
        np.testing.assert_allclose(arrays["advantages"], expected[member], atol=1e-5)
        if config.uses_critic:
            assert targets is not None
            np.testing.assert_allclose(arrays["value_targets"], targets[member], atol=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_split_into_micro_batches_changes_no_advantage(name: str):
    (_, small), (_, large) = targets_of(name, 4, budget=25), targets_of(name, 4, budget=10_000)
    assert small.keys() == large.keys()
    for member, arrays in small.items():
        np.testing.assert_allclose(arrays["advantages"], large[member]["advantages"], atol=1e-6)


def test_observation_tokens_are_jumped_over():
    """An observation between two sampled tokens leaves their advantages as if it were not there."""
    plan, groups = make_step(0, groups=1, size=2, oldest=0)
    with_observation = replace(groups[0].trajectories[0], loss_mask=groups[0].trajectories[0].loss_mask.copy())
    first = with_observation.prompt_length
    with_observation.loss_mask[first + 1] = False
    header = plan.groups[0].trajectories[0]
    fewer = replace(header, version_tokens=((10, header.loss_tokens - 1),))
    members = (fewer, plan.groups[0].trajectories[1])
    plan = replace(plan, groups=(replace(plan.groups[0], trajectories=members),))
    lease = make_lease(plan, [replace(groups[0], trajectories=(with_observation, groups[0].trajectories[1]))])
    config = AdvantageConfig(estimator="gae", baseline="none", gamma=0.9, lam=0.8)
    batches, _ = with_targets(plan, scored(lease, 1000), config, 0.0, CPU)
    tokens = unpacked(batches)
    assert len(tokens[0, 0]["advantages"]) == header.loss_tokens - 1
    expected, _ = traced(lease, config, tokens)
    np.testing.assert_allclose(tokens[0, 0]["advantages"], expected[0, 0], atol=1e-5)
    assert all((batch.advantages[~batch.loss_mask] == 0).all() for batch in batches if batch.advantages is not None)


def test_what_a_kl_target_holds_is_the_kl_of_the_policy_over_tokens_that_an_older_one_sampled():
    """Sampled by the reference from two tokens of 1/2 each, of which the policy would take the first at 3/4: the plain
    mean is negative."""
    plan, groups = make_step(2, groups=6)
    batches = scored(make_lease(plan, groups), 10_000)
    half = [torch.full_like(batch.behavior_logprobs, np.log(0.5)) for batch in batches]
    moved = [torch.where(torch.arange(len(each)) % 2 == 0, np.log(0.75), np.log(0.25)).float() for each in half]
    batches = [
        replace(batch, current_logprobs=policy, behavior_logprobs=other, ref_logprobs=other)
        for batch, policy, other in zip(batches, moved, half, strict=True)
    ]
    first = float(sum((policy[batch.loss_positions] > -1).sum() for batch, policy in zip(batches, moved, strict=True)))
    measured = with_targets(plan, batches, SETTINGS["group_priced"], KL_COEF, CPU)[1].ratios
    (plain, tokens), (weighted, _) = measured["kl/in_reward"], measured["kl/of_policy"]
    share = first / tokens
    assert plain / tokens == pytest.approx(share * np.log(1.5) + (1 - share) * np.log(0.5), abs=1e-5) and plain < 0
    assert weighted / tokens == pytest.approx(share * 1.5 * np.log(1.5) + (1 - share) * 0.5 * np.log(0.5), abs=1e-5)
    assert weighted / tokens > 0.0


def test_a_reference_that_differs_by_rounding_is_charged_nothing():
    """With equal rewards, whitening made advantages of size 1 of it."""
    plan, groups = make_step(1, groups=4)
    batches = scored(make_lease(plan, groups), 10_000)
    for apart, charged in ((1e-5, False), (1e-3, True)):
        moved = [replace(each, ref_logprobs=torch.add(each.current_logprobs, apart)) for each in batches]
        measured = with_targets(plan, moved, SETTINGS["group_priced"], KL_COEF, CPU)[1].ratios
        assert (measured["kl/in_reward"][0] != 0.0) == charged


def test_a_token_the_engine_did_not_score_counts_with_a_ratio_of_one():
    plan, groups = make_step(1, groups=2)
    lease = make_lease(plan, groups)
    batches = scored(lease, 1000)
    behind = [replace(b, behavior_logprobs=b.current_logprobs) for b in batches]
    unscored = [replace(b, behavior_logprobs=torch.full_like(b.behavior_logprobs, float("nan"))) for b in batches]
    config = SETTINGS["vtrace"]
    ones, nans = (with_targets(plan, each, config, 0.0, CPU)[0] for each in (behind, unscored))
    for one, nan in zip(ones, nans, strict=True):
        assert one.advantages is not None and nan.advantages is not None
        assert torch.equal(one.advantages, nan.advantages)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_rank_without_tokens_joins_with_nothing(name: str):
    plan, groups = make_step(2, groups=1)
    empty = [
        replace(
            pack(make_lease(plan, groups), (), CPU),
            **{field: torch.zeros(1) for field in ("current_logprobs", "ref_logprobs", "values")},
        )
    ]
    for batches in (empty, []):
        filled, measured = with_targets(plan, batches, SETTINGS[name], KL_COEF, CPU)
        assert all(batch.advantages is not None and not batch.advantages.any() for batch in filled)
        assert measured.spreads["advantage/"] == (0.0, 0.0, 0.0)


def test_turns_give_other_traces_than_tokens_and_the_tests_see_some():
    tokens, turns = (targets_of(name, 1)[1] for name in ("retrace", "retrace_turns"))
    assert any((np.diff(arrays["position_ids"]) > 1).any() for arrays in turns.values())
    assert not any((np.diff(arrays["position_ids"]) > 1).any() for arrays in tokens.values())


@pytest.mark.parametrize(("name", "says"), [("remax", "greedy completion per group"), ("gdpo", "component short")])
def test_a_named_reward_that_did_not_come_is_never_taken_for_zero(name: str, says: str):
    plan, groups = make_step(0)
    nameless = tuple(
        replace(group, trajectories=tuple(replace(t, rewards={}) for t in group.trajectories)) for group in plan.groups
    )
    plan = replace(plan, groups=nameless)
    with pytest.raises(RewardError, match=says):
        with_targets(plan, scored(make_lease(plan, groups), 1000), SETTINGS[name], KL_COEF, CPU)
