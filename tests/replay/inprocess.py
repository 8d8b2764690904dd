"""The replay in this process: `ReplayCore` behind the same two protocols, for tests and single-process runs.

Threads may share it: every call takes the lock, and all waits are on one condition that every change notifies. Groups
are stored without encoding, but pass the same header checks as on the wire.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from asyncrl.balance import EARLY, UPDATES, begin_step, shard_step
from asyncrl.errors import NoProgress
from asyncrl.evaluation.orders import EvalResult, EvalSummary
from asyncrl.replay.codec.extras import plain_extras
from asyncrl.replay.codec.group import group_header
from asyncrl.replay.codec.wire import extra_size
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.core.requests.rollouts import UnknownPeer
from asyncrl.replay.protocol import Acquired, Board, DroppedSample, InsertReply, Lease, Member, Restored, TrainedReply
from asyncrl.types import Assignment, DropReason, StepPlan, Trajectory, TrajectoryGroup

Value = TypeVar("Value")

BYTES_PER_TOKEN = 13
SAMPLE_GROUPS = 4


class InProcessReplay:
    """Owns the core and makes its clients. `clock` may be a fake; deadlines of waits are in real time."""

    def __init__(
        self,
        settings: AdmissionSettings,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int = 1 << 30,
        heartbeat_timeout_s: float = 1e9,
    ) -> None:
        self.core = ReplayCore(settings, clock, seed=seed, max_bytes=max_bytes, heartbeat_timeout_s=heartbeat_timeout_s)
        self.condition = threading.Condition()

    def rollout(self, worker: str, stats: Callable[[], dict[str, float]] = dict) -> InProcessRollout:
        return InProcessRollout(self, worker, stats)

    def learner(self) -> InProcessLearner:
        return InProcessLearner(self)

    @contextmanager
    def changing(self) -> Iterator[ReplayCore]:
        """Yield the core, locked. Waiting threads check their condition again afterwards."""
        with self.condition:
            yield self.core
            self.condition.notify_all()

    def wait_for(self, ready: Callable[[ReplayCore], Value | None], wait_s: float) -> Value | None:
        """Return `ready(core)` as soon as it is not None; None after `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        with self.condition:
            while True:
                applied = self.core.state.applied
                value = ready(self.core)
                if self.core.state.applied != applied:
                    self.condition.notify_all()
                left = deadline - time.monotonic()
                if value is not None or left <= 0:
                    return value
                self.condition.wait(left)


class InProcessRollout:
    """Implements `RolloutReplay`, and is its own rendezvous. It says hello at construction, and again after the core
    has given the worker up."""

    def __init__(self, replay: InProcessReplay, worker: str, stats: Callable[[], dict[str, float]]) -> None:
        self.worker, self.incarnation = worker, uuid.uuid4().hex
        self._replay, self._stats = replay, stats
        self._served = -1
        with replay.changing() as core:
            core.hello(worker, self.incarnation)

    def rendezvous(self) -> InProcessRollout:
        return self

    async def acquire(self, *, slots: int, wait_s: float) -> Acquired:
        return await asyncio.to_thread(self._acquire, slots, wait_s)

    def _acquire(self, slots: int, wait_s: float) -> Acquired:
        last = Acquired()

        def ask(core: ReplayCore) -> Acquired | None:
            nonlocal last
            self._alive(core)
            last = core.acquire(self.worker, self.incarnation, slots)
            return last if last.assignments or last.evaluations or last.stop else None

        return self._replay.wait_for(ask, wait_s) or last

    async def insert(self, group: TrajectoryGroup, lost: DroppedSample | None = None) -> InsertReply:
        header = group_header(replace(group, worker=self.worker))
        extras = sum(extra_size(extra) for facts in header.trajectories for extra in facts.extras)
        tokens = sum(facts.length for facts in header.trajectories)
        header = replace(header, nbytes=tokens * BYTES_PER_TOKEN + extras)
        group = replace(group, trajectories=tuple(map(_with_plain_extras, group.trajectories)))
        with self._replay.changing() as core:
            self._alive(core)
            return core.insert(self.worker, self.incarnation, header, group)

    async def survey(self, rows: Sequence[int]) -> None:
        with self._replay.changing() as core:
            self._alive(core)
            core.survey(self.worker, self.incarnation, rows)

    async def fail(
        self,
        assignment: Assignment,
        reason: DropReason,
        detail: str,
        rewards: Sequence[float] = (),
        sample: DroppedSample | None = None,
    ) -> None:
        with self._replay.changing() as core:
            self._alive(core)
            whose = (self.worker, self.incarnation, assignment.group_id, assignment.attempt)
            core.fail(*whose, reason, detail, rewards)

    async def report_evaluation(self, result: EvalResult) -> None:
        with self._replay.changing() as core:
            self._alive(core)
            core.report_evaluation(self.worker, self.incarnation, result)

    def served(self, policy_version: int, fingerprint: str) -> None:
        with self._replay.changing() as core:
            self._alive(core)
            core.served(self.worker, self.incarnation, policy_version, fingerprint)
            self._served = policy_version

    def watch(self, revision: int, wait_s: float) -> Board:
        changed = self._replay.wait_for(lambda core: core.board if core.board.revision != revision else None, wait_s)
        return changed or self._replay.core.board

    async def close(self) -> None:
        with self._replay.changing() as core:
            core.goodbye(self.worker, self.incarnation)

    def _alive(self, core: ReplayCore) -> None:
        try:
            core.heartbeat(self.worker, self.incarnation, self._stats())
        except UnknownPeer:
            core.hello(self.worker, self.incarnation, self._served)


class InProcessLearner:
    """Implements `LearnerReplay`. One object may act as all ranks of a learner, one after the other or in threads."""

    def __init__(self, replay: InProcessReplay) -> None:
        self._replay = replay

    def restore(
        self,
        *,
        step: int | None,
        policy_version: int,
        snapshot: dict[str, Any] | None,
        settings: str = "",
        branch: bool = False,
        run: str = "",
    ) -> Restored:
        with self._replay.changing() as core:
            return core.restore(
                step=step,
                policy_version=policy_version,
                snapshot=snapshot,
                incarnation=uuid.uuid4().hex,
                settings=settings,
                branch=branch,
            )

    def publish(self, *, policy_version: int, parent: int) -> None:
        with self._replay.changing() as core:
            core.publish(policy_version=policy_version, parent=parent)

    def lease(self, *, step: int, rank: int, world: int, wait_s: float) -> Lease:
        while True:
            before = self._replay.core.patience_mark(step)
            lease = self._replay.wait_for(lambda core: self._lease(core, step, rank, world), max(wait_s, 0.01))
            if lease is not None:
                return lease
            mark = self._replay.core.patience_mark(step)
            if mark is not None and mark == before:
                why = self._replay.core.explain(step)
                raise NoProgress(f"no group and no token for {wait_s:.1f} s: {why}")

    def _lease(self, core: ReplayCore, step: int, rank: int, world: int) -> Lease | None:
        plan = core.lease(step)
        if plan is None:
            return None
        board = core.board.values
        plan = replace(plan, shards=shard_step(plan, world, board.get(UPDATES, 1), board.get(EARLY, 0)))
        groups = [self._payload(core, plan, position) for position in range(len(plan.groups))]
        places = plan.shards[rank]
        return Lease(
            plan=plan,
            trajectories={(group, t): groups[group].trajectories[t] for group, t in places},
            samples=tuple(groups[:SAMPLE_GROUPS]) if rank == 0 else (),
        )

    def early(self, *, step: int, rank: int, world: int, after: int, upto: int, wait_s: float) -> Lease | None:
        return self._replay.wait_for(lambda core: self._early(core, step, rank, world, after, upto), wait_s)

    def _early(self, core: ReplayCore, step: int, rank: int, world: int, after: int, upto: int) -> Lease | None:
        board, plan = core.board.values, core.certain(step)
        if plan is None or not board.get(EARLY):
            return None
        first = core.run.settings.groups_per_step // board.get(UPDATES, 1)
        begun = begin_step(plan, world, first=first, together=board[EARLY], after=after, upto=upto)
        if begun is None:
            return None
        places = begun.shards[rank]
        return Lease(
            plan=begun, trajectories={(g, t): self._payload(core, begun, g).trajectories[t] for g, t in places}
        )

    def _payload(self, core: ReplayCore, plan: StepPlan, position: int) -> TrajectoryGroup:
        return core.state.ledger.entry(plan.groups[position].group_id).payload

    def trained(self, *, step: int, policy_version: int, ess: Sequence[float] = ()) -> TrainedReply:
        with self._replay.changing() as core:
            return core.trained(step=step, policy_version=policy_version, ess=ess)

    def commit(self, *, step: int) -> None:
        with self._replay.changing() as core:
            core.commit(step)

    def snapshot(self) -> dict[str, Any]:
        with self._replay.changing() as core:
            return core.snapshot()

    def evaluate(self, *, step: int, policy_version: int, eval_set: str, rows: int, chunk: int) -> int:
        with self._replay.changing() as core:
            return core.evaluate(step=step, policy_version=policy_version, eval_set=eval_set, rows=rows, chunk=chunk)

    def wait_evaluations(self, *, wait_s: float) -> tuple[EvalSummary, ...]:
        while True:
            before = self._replay.core.evaluation_mark()
            summaries = self._replay.wait_for(lambda core: core.finished_evaluations(), max(wait_s, 0.01))
            if summaries is not None:
                return summaries
            if self._replay.core.evaluation_mark() == before:
                why = self._replay.core.explain_evaluation()
                raise NoProgress(f"no row and no token for {wait_s:.1f} s: {why}")

    def announce(self, values: dict[str, Any]) -> None:
        with self._replay.changing() as core:
            core.announce(values)

    def members(self) -> list[Member]:
        with self._replay.changing() as core:
            return core.members()

    def watch(self, *, revision: int, wait_s: float) -> Board:
        changed = self._replay.wait_for(lambda core: core.board if core.board.revision != revision else None, wait_s)
        return changed or self._replay.core.board

    def finish(self) -> None:
        with self._replay.changing() as core:
            core.finish()

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def _with_plain_extras(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory as the learner would get it over the wire."""
    return replace(trajectory, extras=plain_extras(trajectory.extras)) if trajectory.extras else trajectory
