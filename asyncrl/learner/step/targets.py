"""Computes the advantages, and the critic's targets, of every loss token of a step, independently of how the step was
split and sharded.

The estimators see one row per trajectory, with its loss tokens next to each other. Observation tokens are skipped.
Tokens above the staleness bound come before the fresh ones, so they are in no return of these, and are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from asyncrl.advantages import (
    AdvantageInputs,
    gae,
    gdpo,
    group_advantages,
    length_adaptive_lambda,
    masked_whiten,
    retrace,
    returns_to_go,
    reward_components,
    segment_log_ratio,
    token_rewards,
    turn_advantages,
    vtrace,
    whitening_moments,
)
from asyncrl.advantages.custom import RewardParts, custom_advantages
from asyncrl.errors import RewardError
from asyncrl.learner.batch.micro_batch import MicroBatch
from asyncrl.learner.batch.packing import sent
from asyncrl.learner.batch.plan import Member
from asyncrl.learner.parallel.collectives import sum_over_data
from asyncrl.learner.step.metrics import Measured
from asyncrl.losses.kl import without_rounding
from asyncrl.schema import AdvantageConfig
from asyncrl.types import GREEDY_REWARD, StepPlan, TrajectoryHeader, members_of

Table = Float[Tensor, "B L"]
"""float64 on the CPU: a scan over tokens is hundreds of tiny operations, which are slower on a GPU."""


NUMBERS = ("current_logprobs", "ref_logprobs", "values", "behavior_logprobs", "position_ids")
"""Per-token fields of a micro-batch that targets are computed from."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The trajectories of this rank's micro-batches of a step, one row each, with their loss tokens in order."""

    plan: StepPlan
    batches: Sequence[MicroBatch]
    members: tuple[Member, ...]
    mask: Bool[Tensor, "B L"]

    @classmethod
    def of(cls, plan: StepPlan, batches: Sequence[MicroBatch]) -> Rows:
        lengths = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *(batch.fresh for batch in batches)]))
        columns = torch.arange(max(int(lengths.max()) if len(lengths) else 0, 1))
        members = tuple(member for batch in batches for member in batch.members)
        return cls(plan=plan, batches=batches, members=members, mask=columns < lengths[:, None])

    @cached_property
    def headers(self) -> list[TrajectoryHeader]:
        """All trajectories of the step, of all ranks, also those that are too old to be trained on."""
        return [trajectory for group in self.plan.groups for trajectory in group.trajectories]

    @cached_property
    def group_ids(self) -> Int[Tensor, " N"]:
        """Group of each of the `headers`."""
        sizes = torch.tensor([len(group.trajectories) for group in self.plan.groups])
        return torch.repeat_interleave(torch.arange(len(sizes)), sizes)

    @cached_property
    def places(self) -> Int[Tensor, " B"]:
        """Index of each row among the `headers`."""
        first = [0, *itertools.accumulate(len(group.trajectories) for group in self.plan.groups)]
        return torch.tensor([first[g] + t for g, t in self.members], dtype=torch.int64)

    @cached_property
    def _tokens(self) -> dict[str, Float[Tensor, " tokens"]]:
        """The `NUMBERS` that the batches have, for all their loss tokens; one transfer from the device."""
        names = [name for name in NUMBERS if all(getattr(batch, name) is not None for batch in self.batches)]
        parts = [
            torch.stack([getattr(batch, name)[batch.loss_positions].double() for name in names])
            for batch in self.batches
        ]
        return dict(zip(names, torch.cat(parts, 1).cpu(), strict=True)) if parts else {}

    def gather(self, name: str) -> Table:
        """The field `name` of the batches as a table; 0 beyond a row's end."""
        table = torch.zeros(self.mask.shape, dtype=torch.float64)
        if self.batches:
            table[self.mask] = self._tokens[name]
        return table

    def turns(self) -> Int[Tensor, "B L"]:
        """Turn of each token within its row: a new turn starts where the preceding token was not sampled."""
        place = self.gather("position_ids")
        begins = torch.ones_like(self.mask)
        begins[:, 1:] = place[:, 1:] != place[:, :-1] + 1
        return begins.cumsum(1)

    def turn_numbers(self, turns: Int[Tensor, " B"]) -> Int[Tensor, "B L"]:
        """Turn of each token among all turns of its trajectory, from 0; counted from the end, since the first turns may
        be too old to be trained on. 0 beyond a row's end.

        Args:
            turns: number of turns of each trajectory.
        """
        here = self.turns() * self.mask
        return (turns[:, None] - here.amax(1, keepdim=True) + here - 1).clamp(min=0) * self.mask

    def spread(self, table: Table, device: torch.device) -> list[Float[Tensor, " tokens"]]:
        """The inverse of `gather`: float32 [T] of each batch, on its device."""
        shares = sent(table[self.mask].float(), device).split([len(batch.loss_positions) for batch in self.batches])
        return [
            torch.zeros(len(batch.input_ids), device=device).index_copy(0, batch.loss_positions, share)
            for batch, share in zip(self.batches, shares, strict=True)
        ]


def with_targets(
    plan: StepPlan, batches: Sequence[MicroBatch], config: AdvantageConfig, kl_coef: float, device: torch.device
) -> tuple[list[MicroBatch], Measured]:
    """Fill in `advantages`, and `value_targets` with a critic. Collective over the ranks.

    Args:
        batches: all of this rank's micro-batches of the step, with their scores.
        kl_coef: KL coefficient of the reward in this step.

    Returns:
        The batches, and this rank's `advantage/*`, `kl/in_reward`, `kl/of_policy` and `critic/*`.

    Raises:
        RewardError: a trajectory lacks a named reward that the settings require.
    """
    rows = Rows.of(plan, batches)
    gap = None
    if config.kl_coef > 0:
        ref = rows.gather("ref_logprobs")
        # Where all rewards are equal, whitening would make full advantages of rounding.
        gap = without_rounding(rows.gather("current_logprobs"), ref) - ref
    penalty = None if gap is None else kl_coef * gap
    per_sequence = config.estimator in ("group", "gdpo") or config.credits_turns
    if config.estimator == "custom":
        advantages, targets = custom_advantage_table(rows, penalty, config, device), None
    elif config.credits_turns:
        advantages, targets = against_turns(rows, config), None
    elif config.baseline == "greedy" and penalty is not None:
        advantages, targets = against_greedy(rows, penalty), None
    elif per_sequence or (config.estimator == "reinforce_pp" and config.baseline != "none"):
        advantages, targets = against_siblings(rows, penalty, config, device), None
    else:
        advantages, targets = per_token(rows, penalty, config)
    if not per_sequence and config.std == "batch":
        moments = sum_over_data(whitening_moments(advantages, rows.mask), device)
        advantages = masked_whiten(advantages, rows.mask, moments=moments)
    measured = Measured(spreads={"advantage/": moments_of(advantages, rows)})
    if gap is not None:
        measured.ratios["kl/in_reward"] = float(gap.sum()), float(rows.mask.sum())
        weighted = gap * log_ratios(rows).clamp(max=MOST_DRAWN).exp()
        measured.ratios[KL_OF_POLICY] = float(weighted.sum()), float(rows.mask.sum())
    value_targets: Sequence[Tensor | None] = [None] * len(batches)
    if targets is not None:
        value_targets = rows.spread(targets, device)
        residual = targets - rows.gather("values")
        measured.spreads |= {
            "critic/target_": moments_of(targets, rows),
            "critic/residual_": moments_of(residual, rows),
        }
    parts = zip(batches, rows.spread(advantages, device), value_targets, strict=True)
    return [replace(batch, advantages=share, value_targets=target) for batch, share, target in parts], measured


KL_OF_POLICY = "kl/of_policy"
MOST_DRAWN = math.log(5.0)
"""Limit on log(learner / behavior): a token's weight in a mean over the learner's distribution is clipped here."""


def price_of_all(rows: Rows, penalty: Table, device: torch.device) -> Float[Tensor, " N"]:
    """KL penalty of every trajectory, extrapolated from its fresh tokens. Collective.

    Without it, siblings that are too old to be trained on would be in the baseline without a penalty, and push all
    fresh ones down.

    A trajectory is charged per loss token what it is charged per fresh one; one without fresh tokens is charged the
    mean of its siblings that have some.
    """
    mine = torch.zeros(len(rows.headers), dtype=torch.float64).index_add(0, rows.places, penalty.sum(1))
    prices = sum_over_data(mine, device)
    fresh = torch.tensor([rows.plan.fresh_tokens(trajectory) for trajectory in rows.headers], dtype=torch.float64)
    tokens = torch.tensor([trajectory.loss_tokens for trajectory in rows.headers], dtype=torch.float64)
    whole = prices / fresh.clamp(min=1) * tokens
    sizes = [len(group.trajectories) for group in rows.plan.groups]
    parts = [
        torch.where(known > 0, price, price[known > 0].mean() if bool((known > 0).any()) else 0.0)
        for price, known in zip(whole.split(sizes), fresh.split(sizes), strict=True)
    ]
    return torch.cat(parts)


def against_siblings(rows: Rows, penalty: Table | None, config: AdvantageConfig, device: torch.device) -> Table:
    """One number per trajectory, for all its tokens: its reward less its KL penalty, compared with its siblings' or
    with that of a greedy completion.

    Rewards come from the headers of all ranks, also of trajectories that are too old to be trained on. The branches of
    an episode count as one sibling: they share its advantage, and the episode is charged for the KL of all of them.
    """
    firsts = members_of(rows.headers)
    headers = [rows.headers[first] for first in firsts]
    episode = torch.tensor([not each.branch for each in rows.headers]).cumsum(0) - 1
    group_ids = rows.group_ids[firsts]
    rewards = torch.tensor([trajectory.reward for trajectory in headers], dtype=torch.float64)
    if penalty is not None:
        rewards = rewards - torch.zeros_like(rewards).index_add(0, episode, price_of_all(rows, penalty, device))
    if config.estimator == "gdpo":
        parts = reward_components([trajectory.rewards for trajectory in headers], list(config.components)).double()
        advantages = gdpo(parts, group_ids, torch.tensor(list(config.components.values()), dtype=torch.float64))
    else:
        greedy = config.baseline == "greedy"
        advantages = group_advantages(
            rewards - greedy_rewards(headers) if greedy else rewards,
            group_ids,
            baseline="none" if greedy else config.baseline,
            std=config.std if config.estimator == "group" else "none",
            lengths=torch.zeros(len(headers), dtype=torch.int64).index_add(
                0, episode, torch.tensor([trajectory.loss_tokens for trajectory in rows.headers])
            ),
        )
    return torch.where(rows.mask, advantages[episode[rows.places]][:, None], 0.0)


def against_turns(rows: Rows, config: AdvantageConfig) -> Table:
    """One number per turn, for all its tokens; see `turn_advantages`. Rewards come from the headers of all ranks. Each
    branch of an episode is treated separately."""
    if not all(trajectory.turn_rewards for trajectory in rows.headers):
        raise RewardError(
            f"advantage.estimator={config.estimator} needs the reward of each turn, but some trajectories do not have "
            "it: they were made under another advantage. Start the workers with the learner's settings (for a rerun, "
            "take a run with that advantage)"
        )
    earned, there = earned_by_turn(rows.headers)
    advantages = turn_advantages(
        earned,
        there,
        rows.group_ids,
        config.gamma,
        config.baseline,
        config.std,
        same_number=config.estimator == "turns_by_number",
    )
    number = rows.turn_numbers(there.sum(1)[rows.places])
    return torch.where(rows.mask, advantages[rows.places].gather(1, number), 0.0)


def earned_by_turn(headers: Sequence[TrajectoryHeader]) -> tuple[Float[Tensor, "N K"], Bool[Tensor, "N K"]]:
    """The reward of each turn, and a mask of the turns that exist; a trajectory without turn rewards has none."""
    most = max((len(header.turn_rewards) for header in headers), default=0)
    earned = torch.zeros(len(headers), max(most, 1), dtype=torch.float64)
    there = torch.zeros(earned.shape, dtype=torch.bool)
    for place, header in enumerate(headers):
        earned[place, : len(header.earned)] = torch.tensor(header.earned, dtype=torch.float64)
        there[place, : len(header.earned)] = True
    return earned, there


def earned_by_token(rows: Rows, penalty: Table | None) -> Table:
    """The reward of each turn at its last token, less the KL penalty at each token. Without turn rewards it is the
    trajectory's reward, at its last token. Turns without a trained token are in no return."""
    headers = [rows.headers[place] for place in rows.places.tolist()]
    whole = torch.tensor([header.reward for header in headers], dtype=torch.float64)
    if not any(header.turn_rewards for header in headers):
        return token_rewards(whole, rows.mask, penalty)
    earned, there = earned_by_turn(headers)
    turns = there.sum(1)
    last = earned.gather(1, (turns - 1).clamp(min=0)[:, None])[:, 0]
    table = token_rewards(torch.where(turns > 0, last, whole), rows.mask, penalty)
    number = rows.turn_numbers(turns)
    ends = torch.zeros_like(rows.mask)
    ends[:, :-1] = rows.mask[:, 1:] & (number[:, 1:] != number[:, :-1])
    return table + torch.where(ends & (turns > 0)[:, None], earned.gather(1, number), 0.0)


def against_greedy(rows: Rows, penalty: Table) -> Table:
    """ReMax (2310.10505) with the KL in the reward: the return from each token on, less the reward of the greedy
    completion. A token is not charged for the KL of earlier tokens.
    """
    greedy = greedy_rewards(rows.headers)
    advantages = returns_to_go(earned_by_token(rows, penalty), rows.mask)
    return torch.where(rows.mask, advantages - greedy[rows.places][:, None], 0.0)


def custom_advantage_table(rows: Rows, penalty: Table | None, config: AdvantageConfig, device: torch.device) -> Table:
    """Advantages from the user's function for the headers of all ranks. A trajectory's trained tokens are its last."""
    inputs = own_inputs(rows.plan, config.components)
    if penalty is not None:
        inputs = replace(inputs, rewards=inputs.rewards - price_of_all(rows, penalty, device))
    table = custom_advantages(inputs, config)[rows.places]
    if table.shape[1] == 1 and rows.mask.shape[1] != 1:
        return torch.where(rows.mask, table, 0.0)
    skipped = (inputs.lengths - inputs.fresh)[rows.places, None]
    columns = (torch.arange(rows.mask.shape[1]) + skipped).clamp(max=table.shape[1] - 1)
    return torch.where(rows.mask, table.gather(1, columns), 0.0)


def own_inputs(plan: StepPlan, components: Mapping[str, float]) -> AdvantageInputs:
    """Inputs of the user's function: all trajectories of the step.

    Raises:
        RewardError: a trajectory lacks a reward that `components` names.
    """
    headers = [trajectory for group in plan.groups for trajectory in group.trajectories]
    if components:
        reward_components([header.rewards for header in headers], list(components))
    shared = set.intersection(*(set(header.rewards) for header in headers)) if headers else set()

    def each(values: Iterable[float], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(list(values), dtype=dtype)

    return AdvantageInputs(
        rewards=each((header.reward for header in headers), torch.float64),
        group_ids=each(place for place, group in enumerate(plan.groups) for _ in group.trajectories),
        episode_ids=each(not header.branch for header in headers).cumsum(0) - 1,
        lengths=each(header.loss_tokens for header in headers),
        fresh=each(plan.fresh_tokens(header) for header in headers),
        prompt_lengths=each(header.prompt_length for header in headers),
        truncated=each((header.finish_reason == "length" for header in headers), torch.bool),
        reward_parts=RewardParts(
            {name: each((header.rewards[name] for header in headers), torch.float64) for name in sorted(shared)}
        ),
    )


def greedy_rewards(headers: Sequence[TrajectoryHeader]) -> Float[Tensor, " N"]:
    """ReMax's baseline of each trajectory (2310.10505): the reward of the greedy completion of its prompt."""
    if not all(GREEDY_REWARD in trajectory.rewards for trajectory in headers):
        raise RewardError(
            "advantage.baseline=greedy needs the reward of a greedy completion per group, but some groups have none: "
            "they were made under another advantage. Start the workers with the learner's settings (for a rerun, take "
            "a run with that advantage)"
        )
    return torch.tensor([trajectory.rewards[GREEDY_REWARD] for trajectory in headers], dtype=torch.float64)


def per_token(rows: Rows, penalty: Table | None, config: AdvantageConfig) -> tuple[Table, Table | None]:
    """Advantages, and value targets with a critic, from the rewards per token (`earned_by_token`)."""
    rewards = earned_by_token(rows, penalty)
    if config.estimator == "reinforce_pp":
        return returns_to_go(rewards, rows.mask, config.gamma), None
    values = rows.gather("values")
    log_ratio = log_ratios(rows) if config.uses_ratio else torch.zeros_like(values)
    trace = segment_log_ratio(log_ratio, rows.mask, rows.turns()) if config.by_turn else log_ratio
    if config.estimator.startswith("vtrace"):
        return vtrace(
            *(rewards, values, log_ratio, rows.mask, config.gamma, config.lam),
            c_bar=config.c_bar,
            trace_log_ratio=trace,
        )

    def traced(lam: float | Tensor) -> tuple[Table, Table]:
        if config.estimator == "gae":
            return gae(rewards, values, rows.mask, config.gamma, lam)
        return retrace(rewards, values, log_ratio, rows.mask, config.gamma, lam, config.c_bar, trace)

    if config.lam_alpha == 0:
        return traced(config.lam)
    # VAPO (2504.05118): the policy's lambda depends on the length, the critic's does not.
    return traced(length_adaptive_lambda(rows.mask, config.lam_alpha).double())[0], traced(config.lam)[1]


def log_ratios(rows: Rows) -> Table:
    """log(learner/behavior) of each token."""
    recorded = rows.gather("behavior_logprobs")
    # As in the losses: a token without a recorded log-prob counts with a ratio of 1.
    return torch.where(recorded.isfinite(), rows.gather("current_logprobs") - recorded, 0.0)


def moments_of(table: Table, rows: Rows) -> tuple[float, float, float]:
    """Sum, sum of squares and count over this rank's tokens (see `Measured.spreads`)."""
    inside = table[rows.mask]
    return float(inside.sum()), float(inside.square().sum()), float(rows.mask.sum())
