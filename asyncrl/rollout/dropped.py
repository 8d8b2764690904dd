"""What a worker shows of groups that it gives up: the first member of one, now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from asyncrl.replay.protocol import DroppedSample
from asyncrl.types import NO_VERSION, Assignment, Prompt, TrajectoryGroup

EVERY_S = 1.0
"""One of each reason: a filter may drop most of what is made, and none of that is to travel."""


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
