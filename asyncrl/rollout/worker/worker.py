"""The loop of a rollout worker: acquire assignments, make groups, insert them.

    acquire ──▶ one task per group: prompt ▶ engine ▶ reward ──▶ insert (or fail, with the reason)
       ▲                                                             │
       └────────────────────────── a slot is free ◀──────────────────┘

consumes:     assignments and evaluation chunks of the replay server
waits for:    a free slot, that is one of its own groups; then for admission, that is the learner (through the server)
unblocked by: a finished group; an assignment; the server's stop; `wait_timeout_s` without any progress (an error)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from asyncrl.checks.permanent import lacks_kernel
from asyncrl.data.prompts import PromptSource
from asyncrl.errors import (
    ConfigError,
    EpisodeError,
    FilterError,
    GenerationError,
    HopelessRunError,
    IncompleteGroupError,
    NoProgress,
    OverlongError,
    RequestError,
    RewardError,
    WireError,
)
from asyncrl.evaluation.orders import EvalAssignment, EvalResult
from asyncrl.replay.core.live.workers import INSERTED, LOST
from asyncrl.replay.protocol import Acquired, RolloutReplay
from asyncrl.rollout.groups.dropped import DroppedSamples, reason_of
from asyncrl.rollout.groups.episode import EpisodeRunner, GroupShape, evaluation_name, order_name, traced
from asyncrl.rollout.groups.filters import Filters
from asyncrl.rollout.groups.outcomes import LATE, GroupOutcomes
from asyncrl.rollout.worker.report import WorkerReport
from asyncrl.spans import span
from asyncrl.types import Assignment, DropReason, Prompt, SamplingParams, TrajectoryGroup

log = logging.getLogger(__name__)

TURN_S = 1.0
"""Longest wait of one turn of the loop; the subscriber and the engine are looked after once a turn."""
PROOF_POLL_S = 0.002
CANCEL_S = 30.0
"""Longest wait for groups that were cancelled."""
MAX_GENERATION_FAILURES = 8
"""Failed generations in a row after which the engine, not the prompts, is taken for broken."""

UNTRAINED = {"rejected": DropReason.REJECTED, "fenced": LATE}
"""Answer of the server to a group -> how it counts in `GroupOutcomes`."""

Result = TypeVar("Result")
Evaluate = Callable[[EvalAssignment], Awaitable[EvalResult]]


class RolloutWorker:
    """The loop and what it holds.

    Args:
        runner: makes the groups.
        evaluations: what scores a chunk of each set that is evaluated beside the training, by the set's name.
        check: raises what stopped the weight subscriber, if anything did.
        proven: false while the weights in the engine wait for their canary; nothing leaves the worker meanwhile.
        filters: what drops finished groups; see `filters.py`.
        slots: orders worked on at once: groups, or members with `replay.admission=sample`.
        rows: of each source of `prompts`, where the server chooses by what was measured; else empty.
        outcomes: names what drops every group, and ends the run for it; the default never ends it.
        wait_timeout_s: longest time with work at hand and no progress.
    """

    def __init__(
        self,
        *,
        name: str,
        replay: RolloutReplay,
        runner: EpisodeRunner,
        prompts: PromptSource,
        evaluations: Mapping[str, Evaluate],
        check: Callable[[], None],
        proven: Callable[[], bool],
        filters: Filters,
        shape: GroupShape,
        sampling: SamplingParams,
        slots: int,
        wait_timeout_s: float,
        report: WorkerReport,
        rows: Sequence[int] = (),
        outcomes: GroupOutcomes | None = None,
    ) -> None:
        self._name = name
        self._rows = tuple(rows)
        self._replay = replay
        self._runner = runner
        self._prompts = prompts
        self._sets = evaluations
        self._check = check
        self._proven = proven
        self._filters = filters
        self._shape = shape
        self._sampling = sampling
        self._slots = slots
        # One request for several slots: asking for each freed slot alone costs a round trip per group.
        self._ask = max(1, slots // 8)
        self._wait_timeout_s = wait_timeout_s
        self._report = report
        self._groups: set[asyncio.Task[None]] = set()
        self._evaluations: dict[asyncio.Task[None], EvalAssignment] = {}
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._failures_in_row = 0
        self._progress = (-1.0, time.monotonic())
        self._dropped = DroppedSamples()
        self._outcomes = outcomes or GroupOutcomes()
        self._looked_at = 0.0
        self._telling = 0
        """Groups and evaluations that are made and wait for the server alone."""

    async def run(self) -> None:
        """Until the server says stop.

        Raises:
            GenerationError: the engine keeps failing.
        HopelessRunError: no group can ever be trained on, or the engine lacks an operation for the model.
            NoProgress: work at hand, and no token or group for `wait_timeout_s`.
            AsyncRLError: whatever else ended the replay client, the subscriber or a group's task.
        """
        try:
            if self._rows:
                await self._replay.survey(self._rows)
            while True:
                self._look_after()
                free = self._slots - len(self._groups)
                if free < self._ask and self._groups:
                    await self._wait_for_slot()
                    continue
                acquired = await self._replay.acquire(slots=free, wait_s=TURN_S)
                if acquired.stop:
                    return
                self._start(acquired)
        finally:
            await self._cancel_all()
            self._report.lap()

    def _start(self, acquired: Acquired) -> None:
        for assignment in acquired.assignments:
            self._groups.add(self._launch(self._make_group(assignment)))
        for evaluation in acquired.evaluations:
            self._evaluations[self._launch(self._evaluate(evaluation))] = evaluation

    async def _make_group(self, assignment: Assignment) -> None:
        order = traced(order_name(assignment))
        with span("group", **order, row=assignment.prompt_index) as made:
            await self._make(assignment, order, made)

    async def _drop_overlong(self, assignment: Assignment, error: OverlongError) -> None:
        await self._replay.fail(assignment, DropReason.OVER_LENGTH, str(error))
        self._outcomes.dropped(DropReason.OVER_LENGTH, str(error), size=self._shape.size)

    async def _make(self, assignment: Assignment, order: dict[str, Any], made: span) -> None:
        try:
            prompt = self._prompts[assignment.prompt_index]
        except OverlongError as error:
            await self._drop_overlong(assignment, error)
            return
        try:
            shape = replace(self._shape, size=1, fewest=1) if assignment.single else self._shape
            group = await self._runner.run_group(
                assignment, prompt, shape=shape, sampling=self._sampling, worker=self._name
            )
        except OverlongError as error:
            self._prompts.count_overlong()
            await self._drop_overlong(assignment, error)
            return
        except IncompleteGroupError as error:
            self._failures_in_row = 0  # some members were generated
            await self._failed(assignment, DropReason.INCOMPLETE, error, prompt)
            return
        except GenerationError as error:
            self._failures_in_row += not isinstance(error, RequestError)  # no engine could serve that
            await self._failed(assignment, DropReason.FAILED_GENERATION, error, prompt)
            if self._failures_in_row >= MAX_GENERATION_FAILURES:
                if lacks_kernel(str(error)):
                    raise HopelessRunError(f"the engine cannot run this model: {error}") from error
                raise
            return
        except (RewardError, EpisodeError) as error:
            await self._failed(assignment, reason_of(error), error, prompt)
            return
        self._failures_in_row = 0
        if not self._proven():
            with span("wait for the canary", **order):
                await self._wait_proven()
        # Filters judge groups, and of one that a resume found half admitted no worker has all.
        if not assignment.single and not await self._passes(assignment, prompt, group):
            return
        lost = self._dropped.of_member(assignment, prompt, group, shape.size)
        try:
            with span("insert", **order):
                reply = await self._told(self._replay.insert(group, lost))
        except WireError as error:  # NaN log-probs, rewards of turns that do not fit, extras that are too large
            await self._failed(assignment, DropReason.FAILED_ENVIRONMENT, error, prompt)
            return
        made.also(status=reply.status)
        self._report.count(f"groups_{reply.status}")
        accepted = reply.status == "accepted"
        kept = sum(int(np.count_nonzero(each.loss_mask)) for each in group.trajectories) if accepted else 0
        self._report.count(INSERTED, kept)
        self._lost(order_name(assignment), "left_out" if accepted else "refused", kept)
        if accepted:
            self._outcomes.trained()
        elif reply.status in UNTRAINED:
            if reply.status == "rejected":
                log.warning("group %d was rejected: %s", assignment.group_id, reply.reason)
            self._outcomes.dropped(UNTRAINED[reply.status], reply.reason, size=len(group.trajectories), row=prompt.row)

    async def _failed(
        self,
        assignment: Assignment,
        reason: DropReason,
        error: Exception,
        prompt: Prompt,
        group: TrajectoryGroup | None = None,
    ) -> None:
        self._report.count("groups_failed")
        self._lost(order_name(assignment), reason.value)
        sample = self._dropped.of(assignment, prompt, reason.value, str(error), group)
        await self._told(self._replay.fail(assignment, reason, str(error), sample=sample))
        size = 1 if assignment.single else self._shape.size
        self._outcomes.dropped(reason, str(error), size=size, row=prompt.row)

    def _lost(self, order: str, fate: str, kept: int = 0) -> None:
        """What became of the tokens that were sampled for an order, but for those that the server has now."""
        self._report.count(LOST[fate], max(0, self._report.sampled.pop(order, 0) - kept))

    async def _told(self, word: Awaitable[Result]) -> Result:
        """waits for: the server, which answers when its disk has taken it in; unblocked by: the answer, or the client,
        which knows whether the server is there."""
        self._telling += 1
        try:
            return await word
        finally:
            self._telling -= 1

    async def _passes(self, assignment: Assignment, prompt: Prompt, group: TrajectoryGroup) -> bool:
        """Whether the filters let the group through; if not, its end is reported."""
        try:
            unwanted = await self._filters.why_dropped(group, prompt)
        except FilterError as error:
            await self._failed(assignment, DropReason.FAILED_FILTER, error, prompt, group)
            return False
        if unwanted is not None:
            self._report.count("groups_filtered")
            self._lost(order_name(assignment), unwanted.reason.value)
            rewards = [trajectory.reward for trajectory in group.trajectories if not trajectory.branch]
            why = unwanted.reason, unwanted.detail
            sample = self._dropped.of(assignment, prompt, why[0].value, why[1], group)
            await self._told(self._replay.fail(assignment, *why, rewards, sample))
            self._outcomes.dropped(*why, size=len(rewards), row=prompt.row)
        return unwanted is None

    async def _evaluate(self, assignment: EvalAssignment) -> None:
        if assignment.eval_set not in self._sets:
            known = ", ".join(self._sets) or "none"
            raise ConfigError(
                f"this worker was asked to evaluate {assignment.eval_set!r}, but its evaluation sets are: {known}. "
                "Give all processes of a run the same eval.path and eval.sets"
            )
        with span("evaluate", **traced(evaluation_name(assignment)), set=assignment.eval_set):
            result = await self._sets[assignment.eval_set](assignment)
        await self._wait_proven()
        await self._told(self._replay.report_evaluation(result))
        self._lost(evaluation_name(assignment), "evaluation")
        self._report.count("evaluation_rows", len(result.scores))

    async def _wait_proven(self) -> None:
        """waits for: the canary of what the engine serves; unblocked by: it, or the failure that ends this worker."""
        while not self._proven():
            await asyncio.sleep(PROOF_POLL_S)

    def _launch(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._report.working(True)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._groups.discard(task)
        self._evaluations.pop(task, None)
        self._report.working(bool(self._groups or self._evaluations))
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
        self._changed.set()

    async def _wait_for_slot(self) -> None:
        """waits for: one of this worker's groups; unblocked by: its end, or the next turn."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):  # the next turn looks after engine and subscriber
            async with asyncio.timeout(TURN_S):
                await self._changed.wait()

    def _look_after(self) -> None:
        """Raise what should end this worker: a task's error, the subscriber's, or a standstill."""
        if self._error is not None:
            raise self._error
        self._check()
        now = time.monotonic()
        if now - self._looked_at < TURN_S:
            return
        self._looked_at = now
        self._report.lap()
        mark = self._report.progress()
        if mark != self._progress[0] or len(self._groups) + len(self._evaluations) <= self._telling:
            self._progress = (mark, now)
        elif now - self._progress[1] > self._wait_timeout_s and not self._groups:
            self._give_up_evaluations()
            self._progress = (mark, now)
        elif now - self._progress[1] > self._wait_timeout_s:
            raise NoProgress(
                f"{len(self._groups)} groups are being made, but the engine generated no token for "
                f"{self._wait_timeout_s:.0f} s (half of replay.wait_timeout_s). The engine of {self._name} hangs, or "
                "an environment waits for something else"
            )

    def _give_up_evaluations(self) -> None:
        """Only they are silent: their rows have failed, and the worker is there for groups that come."""
        for task, given in list(self._evaluations.items()):
            failed = EvalResult.all_failed(given)
            log.warning(
                "%d rows of evaluation %s are given up: no token was generated for them", failed.failed, given.eval_set
            )
            task.cancel()
            self._groups.add(self._launch(self._replay.report_evaluation(failed)))

    async def _cancel_all(self) -> None:
        tasks = [*self._groups, *self._evaluations]
        for task in tasks:
            task.cancel()
        _, left = await asyncio.wait(tasks, timeout=CANCEL_S) if tasks else ((), ())
        if left:  # waited for, they would keep a worker that has failed from saying so
            log.warning(
                "%d groups were cancelled but still run after %g s: an environment catches the cancellation",
                len(left),
                CANCEL_S,
            )
