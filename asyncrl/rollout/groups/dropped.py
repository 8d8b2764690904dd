"""What a worker shows of groups that it gives up, and of members that a group lacks: one, now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from asyncrl.errors import GenerationError, RewardError
from asyncrl.replay.protocol import MEMBER, DroppedSample
from asyncrl.types import NO_VERSION, Assignment, DropReason, Prompt, TrajectoryGroup

EVERY_S = 1.0
"""One of each reason: a filter may drop most of what is made, and none of that is to travel."""


def reason_of(error: Exception) -> DropReason:
    """Of an episode that failed."""
    if isinstance(error, GenerationError):
        return DropReason.FAILED_GENERATION
    return DropReason.FAILED_REWARD if isinstance(error, RewardError) else DropReason.FAILED_ENVIRONMENT


class DroppedSamples:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._told = clock, dict[str, float]()

    def of(
        self, assignment: Assignment, prompt: Prompt, reason: str, detail: str, group: TrajectoryGroup | None = None
    ) -> DroppedSample | None:
        """None where one of this reason was told less than `EVERY_S` ago. `group`: where one was made."""
        now = self._clock()
        if now - self._told.get(reason, -math.inf) < EVERY_S:
            return None
        self._told[reason] = now
        known = DroppedSample(group_id=assignment.group_id, prompt=prompt.text, dropped=reason, detail=detail)
        return known if group is None else with_first(known, group)

    def of_member(
        self, assignment: Assignment, prompt: Prompt, group: TrajectoryGroup, size: int
    ) -> DroppedSample | None:
        """The last of those without which a group of `size` members was closed; None where it has all, or as `of`."""
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
