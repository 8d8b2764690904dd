"""A replay whose batches fill up while the learner waits: some parts of each are given out before the lease."""

from __future__ import annotations

import threading
from dataclasses import replace

from asyncrl.balance import begin_step, shard_step
from asyncrl.replay.protocol import Lease
from asyncrl.types import StepPlan, TrajectoryGroup
from tests.learner.fed_replay import FedReplay
from tests.learner.feed import make_lease, make_step

DEADLINE_S = 120.0


class EarlyReplay(FedReplay):
    """Step k is `make_step(seed + k)`.

    Args:
        parts: number of parts of each step that are given out before its lease.
        together: groups of a part, as `learner.early_groups`.
        updates: as `learner.updates_per_batch`.
        swapped: steps whose first two groups are sealed in another order than announced in the parts.
    """

    def __init__(
        self, parts: int, *, together: int, updates: int = 1, swapped: tuple[int, ...] = (), groups: int = 8
    ) -> None:
        super().__init__(groups=groups)
        self._parts, self._together, self._updates, self._swapped = parts, together, updates, swapped
        self.given: dict[int, int] = {}
        """Step -> number of parts given out."""
        self._changed = threading.Condition()

    def let_go(self) -> None:
        """Unblock all waiting leases: no further parts are required."""
        with self._changed:
            self._parts = 0
            self._changed.notify_all()

    def _made(self, step: int) -> tuple[StepPlan, list[TrajectoryGroup]]:
        return make_step(step, groups=self._groups, size=self._size, step=step)

    def lease(self, *, step: int, rank: int, world: int, wait_s: float) -> Lease:
        with self._changed:
            if not self._changed.wait_for(lambda: self.given.get(step, 0) >= self._parts, DEADLINE_S):
                raise AssertionError(f"step {step} is waited for, of the steps {self.given} parts were asked for")
        plan, groups = self._made(step)
        if step in self._swapped:
            turned = [1, 0, *range(2, len(groups))]
            plan = replace(plan, groups=tuple(plan.groups[g] for g in turned))
            groups = [groups[g] for g in turned]
        return make_lease(replace(plan, shards=shard_step(plan, world, self._updates, self._together)), groups, rank)

    def early(self, *, step: int, rank: int, world: int, after: int, upto: int, wait_s: float) -> Lease | None:
        plan, groups = self._made(step)
        with self._changed:
            if self.given.get(step, 0) >= self._parts:
                return None
            self.given[step] = self.given.get(step, 0) + 1
            self._changed.notify_all()
        if not upto:
            plan = replace(plan, groups=plan.groups[: after + self._together])
        first = self._groups // self._updates
        part = begin_step(plan, world, first=first, together=self._together, after=after, upto=upto)
        return None if part is None else make_lease(part, groups[after:], rank)
