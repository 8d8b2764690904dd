"""Samples of dropped groups, and of members missing from a group, for the log; rate-limited."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from asyncrl.errors import GenerationError, RewardError
from asyncrl.replay.protocol import MEMBER, DroppedSample
from asyncrl.types import NO_VERSION, Assignment, DropReason, Prompt, TrajectoryGroup

EVERY_S = 1.0
"""Seconds between two samples of the same reason: a filter may drop most groups, and those should not be sent."""


def reason_of(error: Exception) -> DropReason:
    """The reason for an episode that failed."""
    if isinstance(error, GenerationError):
        return DropReason.FAILED_GENERATION
    return DropReason.FAILED_REWARD if isinstance(error, RewardError) else DropReason.FAILED_ENVIRONMENT


class DroppedSamples:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._told = clock, dict[str, float]()

    def of(
        self, assignment: Assignment, prompt: Prompt, reason: str, detail: str, group: TrajectoryGroup | None = None
    ) -> DroppedSample | None:
        """Return None if a sample of this reason was reported less than `EVERY_S` ago. `group`: if one was made."""
        now = self._clock()
        if now - self._told.get(reason, -math.inf) < EVERY_S:
            return None
        self._told[reason] = now
        known = DroppedSample(group_id=assignment.group_id, prompt=prompt.text, dropped=reason, detail=detail)
        return known if group is None else with_first(known, group)

    def of_member(
        self, assignment: Assignment, prompt: Prompt, group: TrajectoryGroup, size: int
    ) -> DroppedSample | None:
        """A sample of the last failure among a group's missing members; None if all `size` are there, or as `of`."""
        if group.lost is None:
            return None
        lost = size - sum(not trajectory.branch for trajectory in group.trajectories)
        detail = f"{lost} of {size} members are missing, the others are kept; the last failure: {group.lost}"
        reason = reason_of(group.lost).value
        shown = self.of(assignment, prompt, MEMBER + reason, detail)
        return None if shown is None else replace(shown, dropped=reason)


def with_first(known: DroppedSample, group: TrajectoryGroup) -> DroppedSample:
    first = group.trajectories[0]
    versions = first.policy_versions[first.loss_mask].tolist() or [NO_VERSION]
    return replace(
        known,
        completion=group.completion_texts[0] if group.completion_texts else "",
        reward=first.reward,
        rewards=first.rewards,
        finish_reason=first.finish_reason,
        version_min=min(versions),
        version_max=max(versions),
    )
