"""Drops groups that are not worth training on, on the worker, so that they are never sent.

A dropped group is counted with its reason and makes room for exactly one new prompt, so batches stay full (dynamic
sampling as in DAPO). The user's own filters (`rollout.filters`) run after the built-in ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from asyncrl.errors import FilterError, HopelessFilterError
from asyncrl.rewards.filter_pool import FilterPool
from asyncrl.rewards.filters import FinishedGroup, Verdict
from asyncrl.rollout.rewards.failure_share import FailureShare
from asyncrl.schema import RolloutConfig
from asyncrl.types import DropReason, Prompt, TrajectoryGroup, members_of

SHOWN = 400
"""Limit on the characters shown of the last failure."""
ROUNDING = 1e-6
"""Relative difference of rewards that counts as none."""
GroupFilter = Callable[[TrajectoryGroup], bool]
"""Returns True if the group is to be dropped."""


def zero_variance(group: TrajectoryGroup, parts: Sequence[str] = ()) -> bool:
    """All rewards are equal: with a group baseline every advantage is 0. With `parts`, each of these parts is."""
    if not parts:
        return _same([trajectory.reward for trajectory in group.trajectories])
    return all(_same([each.rewards[name] for each in group.trajectories if name in each.rewards]) for name in parts)


def _same(values: Sequence[float]) -> bool:
    """Whether numbers are equal but for rounding: a reward model gives 0.99999994 and 1.0 for the same answer, and a
    baseline with a standard deviation would enlarge the difference."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return high - low <= ROUNDING * max(abs(low), abs(high))


def any_truncated(group: TrajectoryGroup) -> bool:
    return any(trajectory.finish_reason == "length" for trajectory in group.trajectories)


def all_truncated(group: TrajectoryGroup) -> bool:
    return all(trajectory.finish_reason == "length" for trajectory in group.trajectories)


TRUNCATED: dict[str, GroupFilter | None] = {"never": None, "any": any_truncated, "all": all_truncated}
BuiltIn = Sequence[tuple[DropReason, GroupFilter]]


@dataclass(frozen=True, slots=True)
class Unwanted:
    reason: DropReason
    detail: str
    """Which filter, and its reason."""


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters, in the order in which they are applied."""

    built_in: BuiltIn = ()
    own: Sequence[FilterPool] = ()
    """The user's filters."""
    max_failure_share: float = 1.0
    """`reward.max_failure_share`: groups that a filter fails for are dropped, and if all are, no step is trained."""
    where: Callable[[int], str] = str
    """File and line of a row."""
    _shares: dict[int, FailureShare] = field(default_factory=dict)
    """By position in `own`: failures of one filter say nothing about another."""

    async def why_dropped(self, group: TrajectoryGroup, prompt: Prompt) -> Unwanted | None:
        """The result of the first filter that wants to drop the group.

        Raises:
            FilterError: one of the user's filters failed, so the group is neither kept nor dropped by it.
            HopelessFilterError: a filter fails so often that the run cannot make progress.
        """
        for reason, unwanted in self.built_in:
            if unwanted(group):
                return Unwanted(reason, "by rollout.drop_*")
        for place, pool in enumerate(self.own):
            verdict = await self._judged(place, group, prompt)
            if not verdict.keep:
                return Unwanted(DropReason.FILTERED, f"{pool.name}: {verdict.why}" if verdict.why else pool.name)
        return None

    async def _judged(self, place: int, group: TrajectoryGroup, prompt: Prompt) -> Verdict:
        share = self._shares.setdefault(place, FailureShare(self.max_failure_share))
        pool, size = self.own[place], len(members_of(group.trajectories))
        try:
            verdict = await pool.judge(finished(group, prompt))
        except FilterError as error:
            if too_many := share.add(0, size):
                raise HopelessFilterError(
                    f"the filter {pool.name} of rollout.filters failed {too_many}. The last group, row {prompt.row} "
                    f"({self.where(prompt.row)}): {' '.join(str(error).split()):.{SHOWN}}. Fix the filter and continue "
                    "with resume=auto, or raise reward.max_failure_share"
                ) from error
            raise
        share.add(size, 0)
        return verdict


def finished(group: TrajectoryGroup, prompt: Prompt) -> FinishedGroup:
    """The group as the user's filters see it: the first conversation of each episode."""
    firsts = members_of(group.trajectories)
    members = [group.trajectories[first] for first in firsts]
    return FinishedGroup(
        completions=[text for place, text in enumerate(group.completion_texts) if place in firsts],
        rewards=[trajectory.reward for trajectory in members],
        parts=[trajectory.rewards for trajectory in members],
        finish_reasons=[trajectory.finish_reason for trajectory in members],
        lengths=[int(np.count_nonzero(trajectory.loss_mask)) for trajectory in members],
        row=prompt.columns,
    )


def built_in_filters(config: RolloutConfig, parts: Sequence[str] = ()) -> BuiltIn:
    """The built-in filters that the settings ask for.

    Args:
        parts: the parts of the reward that `drop_zero_variance` compares; empty for the reward itself.
    """
    filters: list[tuple[DropReason, GroupFilter]] = []
    truncated = TRUNCATED[config.drop_truncated]
    if truncated is not None:
        filters.append((DropReason.OVER_LENGTH, truncated))
    if config.drop_zero_variance:
        filters.append((DropReason.FILTERED_ZERO_VARIANCE, partial(zero_variance, parts=parts)))
    return filters
