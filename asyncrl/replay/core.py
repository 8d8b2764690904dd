"""The replay without sockets, threads or files: requests in, decisions out, time from a clock that is passed in.

    worker:   hello · heartbeat · acquire → insert | fail · served · report_evaluation · goodbye
    learner:  restore · publish · lease → trained → commit · evaluate · announce · snapshot · finish
    host:     expire (now and then)

No call waits. What cannot be answered yet returns None or an empty reply, and the host (`server.py`, `inprocess.py`)
asks again after the next event. All durable changes go through `_record`, which is where a journal listens.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict
from typing import Any

from asyncrl.errors import FencedError, ReplayError
from asyncrl.replay import events as ev
from asyncrl.replay.base import Board, Restored, TrainedReply
from asyncrl.replay.issue import why_no_batch
from asyncrl.replay.ledger import Entry, GroupState
from asyncrl.replay.rollout_side import RolloutSide
from asyncrl.replay.sealing import choose_batch
from asyncrl.replay.state import ReplayState
from asyncrl.types import NO_VERSION, DropReason, EvalSummary, StepPlan


class ReplayCore(RolloutSide):
    """`journal` is called with every event before it is applied. `clock` counts seconds from anywhere. `state` is what
    a journal remembers; without one the core begins empty."""

    _last_trained: tuple[int, int, TrainedReply] | None = None
    _handed_out: tuple[EvalSummary, ...] = ()
    """Evaluation results that were given to the learner last."""
    _handed_to = ("", -1)
    """Incarnation and number of the request they answered."""

    @property
    def board(self) -> Board:
        return self.state.peers.board

    def restore(
        self, *, step: int | None, policy_version: int, snapshot: dict[str, Any] | None, incarnation: str = ""
    ) -> Restored:
        """A learner goes on from the checkpoint of `step`; see `LearnerReplay.restore`.

        Raises:
            FencedError: a newer learner has taken over.
            ReplayError: neither this server's memory nor the snapshot reaches that checkpoint.
        """
        number = -1 if step is None else step
        peers = self.state.peers
        if incarnation in peers.past_learners:
            raise FencedError("a newer learner has restored since; this one has to stop")
        if peers.restored and incarnation == peers.learner and peers.restored[:2] == (number, policy_version):
            # A resent request must not undo what was trained in between.
            return Restored(next_step=number + 1, next_version=peers.restored[2])
        remembered = self.state.committed_step <= number < self.state.trained_steps
        if not remembered:
            self._reload(number, snapshot)
        if policy_version != NO_VERSION and policy_version not in self.state.tree:
            raise ReplayError(
                f"the checkpoint of step {number} has policy_version {policy_version}, never published here"
            )
        self._record(ev.Restored(number, policy_version, incarnation))
        self.evaluations.cancel()
        self._last_trained, self._handed_out = None, ()
        return Restored(next_step=number + 1, next_version=self.state.tree.newest + 1)

    def hello_learner(self, rank: str, incarnation: str) -> None:
        """A learner rank is there. What earlier lives of it still have under way is refused from now on: a restore that
        arrives late would fence the learner that runs.

        Raises:
            FencedError: a newer incarnation of this rank has said hello.
        """
        name = f"learner {rank}"
        self._refuse_replaced(name, incarnation)
        if self.state.peers.newest(name) != incarnation:
            self._record(ev.Joined(name, incarnation))

    def check_rank(self, rank: str, incarnation: str) -> None:
        """Raises FencedError when a newer incarnation of this rank has said hello."""
        self._refuse_replaced(f"learner {rank}", incarnation)

    def check_learner(self, incarnation: str) -> None:
        """Raises FencedError for a learner that was replaced, ReplayError for one that has not restored."""
        if incarnation in self.state.peers.past_learners:
            raise FencedError("a newer learner has restored since; this one has to stop")
        if incarnation != self.state.peers.learner:
            raise ReplayError("this server knows of no running learner; restart the learner from its checkpoint")

    def publish(self, *, policy_version: int, parent: int) -> None:
        """Weights that no step trained: the initial ones, or restored ones (the parent's own) under a new number."""
        if policy_version in self.state.tree:
            # Asked again, perhaps long after: refused if it means other weights, and never a step back.
            self.state.tree.publish(policy_version, parent, length=0)
        else:
            # Refused before it is journalled: a record that cannot be applied would stop every recovery.
            copy.deepcopy(self.state.tree).publish(policy_version, parent, length=0)
            self._record(ev.Published(policy_version, parent))

    def lease(self, step: int) -> StepPlan | None:
        """The sealed batch of `step` (without shards); None while it cannot be sealed. The same plan every time.

        Raises:
            ReplayError: the step is committed, or more than one ahead of the next.
        """
        state, buffer = self.state, self.state.buffer
        if step < state.trained_steps:
            trained = buffer.trained.get(step)
            if trained is None or trained.evicted or trained.plan is None:
                raise ReplayError(f"step {step} was trained and forgotten; the next step is {state.trained_steps}")
            return trained.plan
        ahead = step - state.trained_steps
        if state.finished or ahead > 1:
            why = "the run is finished" if state.finished else f"step {state.trained_steps} is not trained"
            raise ReplayError(f"step {step} cannot be leased: {why}")
        plan = self._seal(step, ahead)
        if ahead == 0 and plan is not None:
            self.meter.idle.note(self.clock(), None)
        return plan

    def patience_mark(self, step: int) -> tuple[int, int] | None:
        """What a waiting `lease(step)` may see move: groups inserted, steps trained. Its patience starts anew with each
        change. None: steps before it are still to be trained, so it waits for the learner itself and not for rollouts.
        """
        mark = self.meter.inserted_groups, self.state.trained_steps
        return None if step > self.state.trained_steps else mark

    def trained(self, *, step: int, policy_version: int) -> TrainedReply:
        """Count a step and publish its version. Repeating the last one returns the same reply.

        Raises:
            ReplayError: not the next step, or it was never leased.
        """
        state = self.state
        if self._last_trained and self._last_trained[:2] == (step, policy_version):
            return self._last_trained[2]
        if (step + 1, policy_version) == (state.trained_steps, state.version):
            # Asked again of a server that was restarted since: it is counted, only the reply was lost.
            return TrainedReply(metrics=self.metrics(), evaluations=self._take_evaluations())
        sealed = state.buffer.untrained.get(step)
        if step != state.trained_steps or sealed is None or sealed.plan is None:
            raise ReplayError(f"step {step} was not leased as the next step; the next is {state.trained_steps}")
        if policy_version <= state.tree.newest:
            raise ReplayError(f"policy_version {policy_version} is not above {state.tree.newest}: never reused")
        plan = sealed.plan
        self._record(ev.Trained(step, policy_version))
        again = [entry.group_id for entry in sealed.members if self._may_reuse(entry)]
        if again:
            self._record(ev.Reused(tuple(again)))
        self._make_room()
        staleness = self.meter.train(plan)
        metrics = self.metrics() | staleness
        reply = TrainedReply(metrics=metrics, evaluations=self._take_evaluations())
        self._last_trained = (step, policy_version, reply)
        return reply

    def commit(self, step: int) -> None:
        """Raises ReplayError when `step` was not trained."""
        if step >= self.state.trained_steps:
            raise ReplayError(f"step {step} cannot be committed: the next to be trained is {self.state.trained_steps}")
        if step > self.state.committed_step:
            self._record(ev.Committed(step))

    def snapshot(self) -> dict[str, Any]:
        return self.state.snapshot()

    def announce(self, values: dict[str, Any]) -> None:
        self._record(ev.Announced(values))

    def evaluate(self, *, step: int, policy_version: int, eval_set: str, rows: int, chunk: int) -> int:
        wanted = {
            "step": step,
            "policy_version": policy_version,
            "eval_set": eval_set,
            "rows": rows,
            "chunk": chunk,
        }
        known = [job for job in self.state.peers.evaluations.values() if asdict(job) == wanted | {"job_id": job.job_id}]
        if known:
            return known[0].job_id  # Asked again of a server that was restarted before it could answer.
        job_id = self.state.peers.next_job
        asked = ev.EvaluationAsked(job_id=job_id, **wanted)
        self.evaluations.start(**asdict(asked))
        self._record(asked)
        return job_id

    def finished_evaluations(self, incarnation: str = "", request: int = -1) -> tuple[EvalSummary, ...] | None:
        """Those not handed out before, once none is open; None until then. The same `request` asked again gets the same
        ones: its answer was lost, and nothing else still has them."""
        if request >= 0 and (incarnation, request) == self._handed_to:
            return self._handed_out
        return None if self.evaluations.open else self._take_evaluations((incarnation, request))

    def _take_evaluations(self, asked_by: tuple[str, int] = ("", -1)) -> tuple[EvalSummary, ...]:
        """Results not handed out yet. Those handed out before have arrived, or the learner would not ask for more."""
        for summary in self._handed_out:
            self._record(ev.EvaluationClosed(summary.job_id))
        self._handed_out, self._handed_to = self.evaluations.take(), asked_by
        return self._handed_out

    def finish(self) -> None:
        """Drop what is open and tell workers to stop. Repeating it is harmless."""
        self._resumed_by = -math.inf
        if self.state.finished:
            return
        for entry in list(self.state.ledger.entries.values()):
            if entry.state is GroupState.TRAINED:
                continue
            if entry.trained:
                self._record(ev.Retired(entry.group_id))
            else:
                self._drop(entry, DropReason.SHUTDOWN)
        self.evaluations.cancel()
        self._record(ev.Finished())

    def metrics(self) -> dict[str, float]:
        """Ledger counts, costs and rates; the rates are since the last call."""
        ledger = self.state.ledger
        row = {f"replay/{state.value}": float(count) for state, count in ledger.counts.items()}
        row |= {f"replay/dropped_{name}": float(count) for name, count in ledger.dropped_by_name().items()}
        row |= {
            "replay/admitted": float(ledger.admitted),
            "replay/bytes": float(self.state.buffer.nbytes),
            "replay/workers": float(len(self.workers.live)),
        }
        return row | self.meter.row(
            self.clock(),
            generated_tokens=self.workers.total("generated_tokens"),
            waiting_s=self.workers.total("waiting_s"),
            workers=len(self.workers.live),
        )

    def explain(self, step: int) -> str:
        """Whom the learner waits for, in words."""
        why = why_no_batch(self.state, self.settings, self.workers, step)[1]
        return f"{self.why_paused}; {why}" if self.why_paused else why

    def _may_reuse(self, entry: Entry) -> bool:
        if entry.state is not GroupState.TRAINED or entry.payload is None or entry.header is None:
            return False
        if entry.trained >= self.settings.max_times_sampled:
            return False
        # Over-age for the next step it would only hold a place that a new group could have.
        versions = {version for trajectory in entry.header.trajectories for version, _ in trajectory.version_tokens}
        state = self.state
        return min(state.tree.distance(version, state.version) for version in versions) <= state.max_staleness

    def _seal(self, step: int, ahead: int) -> StepPlan | None:
        buffer = self.state.buffer
        sealed = buffer.untrained.get(step)
        if sealed is not None and sealed.plan is not None:
            return sealed.plan
        if ahead and self._seal(step - 1, ahead - 1) is None:
            return None  # Sealing out of order would let a later step take the older groups.
        choice = choose_batch(self.state, self.settings, step=step, ahead=ahead, seed=self.seed)
        for entry in choice.stale:
            if entry.trained:
                self._record(ev.Retired(entry.group_id))
                continue
            if entry.header is not None:
                self.meter.drop_stale(entry.header)
            self._drop(entry, DropReason.STALE, readmit=self.settings.readmit_dropped)
        if choice.batch is None:
            if ahead == 0:
                self.meter.idle.note(self.clock(), why_no_batch(self.state, self.settings, self.workers, step)[0])
            return None
        members = tuple(entry.group_id for entry in choice.batch)
        self._record(ev.Sealed(step, self.state.version, ahead, members))
        return buffer.untrained[step].plan

    def _reload(self, number: int, snapshot: dict[str, Any] | None) -> None:
        if snapshot is None:
            raise ReplayError(
                f"the learner's checkpoint is of step {number}; this server remembers steps "
                f"{self.state.committed_step}..{self.state.trained_steps - 1} and the checkpoint has no snapshot. "
                f"Resume from a newer checkpoint, or start with a new run folder"
            )
        if snapshot.get("step") != number:
            raise ReplayError(f"the replay snapshot is of step {snapshot.get('step')}, the checkpoint of step {number}")
        ReplayState(self.settings.max_staleness).apply(ev.Reloaded(snapshot))  # Or it would be refused too late.
        for member in self.workers.live.values():
            member.held.clear()
        self._record(ev.Reloaded(snapshot))
