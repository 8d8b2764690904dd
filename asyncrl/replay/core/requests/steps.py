"""The learner's side of the core: from restore to commit, and the evaluations it asks for."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from asyncrl.errors import FencedError, ReplayError
from asyncrl.evaluation.orders import EvalSummary
from asyncrl.replay.core.batches.selection import choose_batch
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.ledger import Entry, GroupState
from asyncrl.replay.core.durable.siblings import Group, groups_of
from asyncrl.replay.core.durable.state import ReplayState
from asyncrl.replay.core.requests.fair_share import what_is_missing, who_is_silent, why_no_batch
from asyncrl.replay.core.requests.retries import Retries
from asyncrl.replay.core.requests.space import Space
from asyncrl.replay.core.run import Run
from asyncrl.replay.protocol import Restored, TrainedReply
from asyncrl.types import NO_VERSION, DropReason, StepPlan

LEADER = "learner rank 0"
"""The rank that restores, on behalf of all ranks."""
REPLACED = (
    "a newer learner has restored the run, so this one must stop. If the newer one was started by mistake, stop it "
    "and start this one again with resume=auto"
)

STRANGER = (
    "a learner of another run folder trains here, and was still alive when this one arrived. If this one was started "
    "by mistake, stop it. If it is to take over, end the other one first"
)


class Steps:
    """Handles every request of the learner."""

    def __init__(self, run: Run, retries: Retries, space: Space) -> None:
        self._run, self._state, self._retries, self._space = run, run.state, retries, space
        self._last_trained: tuple[int, int, TrainedReply] | None = None
        self._handed_out: tuple[EvalSummary, ...] = ()
        """The evaluation results that were last given to the learner."""
        self._handed_to = ("", -1)
        """Incarnation and number of the request that they answered."""

    def restore(
        self,
        *,
        step: int | None,
        policy_version: int,
        snapshot: dict[str, Any] | None,
        incarnation: str = "",
        settings: str = "",
        branch: bool = False,
        run: str = "",
        beside: Collection[str] = (),
    ) -> Restored:
        """Resume a learner from the checkpoint of `step`; see `LearnerReplay.restore`.

        Args:
            beside: incarnations that were active when this learner connected.

        Raises:
            FencedError: a newer learner has taken over.
            ReplayError: neither this server's state nor the snapshot covers that checkpoint.
        """
        number = -1 if step is None else step
        peers = self._state.peers
        if incarnation in peers.past_learners:
            raise FencedError(REPLACED)
        if peers.restored and incarnation == peers.learner and peers.restored[:2] == (number, policy_version):
            # A resent request must not undo steps trained since the first one.
            return Restored(next_step=number + 1, next_version=peers.restored[2])
        self._run.refuse_replaced(LEADER, incarnation)
        if peers.learner in beside and run and peers.run not in ("", run):
            raise FencedError(STRANGER)
        remembered = self._state.committed_step <= number < self._state.trained_steps
        if not remembered:
            self._reload(number, snapshot)
        if policy_version != NO_VERSION and policy_version not in self._state.tree:
            raise ReplayError(
                f"the checkpoint of step {number} has policy_version {policy_version}, which was never published here"
            )
        same = settings == self._state.learner_settings and not self._state.forking
        again = remembered and same and not branch
        self._run.record(ev.Restored(number, policy_version, incarnation, settings, again, run))
        self._run.meter.restore(number)
        self._run.evaluations.cancel()
        self._last_trained, self._handed_out = None, ()
        return Restored(next_step=number + 1, next_version=self._state.tree.newest + 1)

    def hello_learner(self, rank: str, incarnation: str) -> None:
        """Register a learner rank. From now on a restore by an earlier incarnation of it is refused: arriving late, it
        would fence the running learner.

        Raises:
            FencedError: see `check_rank`.
        """
        name, peers = f"learner {rank}", self._state.peers
        self.check_rank(rank, incarnation)
        if peers.newest(name) != incarnation and not peers.replaced(name, incarnation):
            self._run.record(ev.Joined(name, incarnation))

    def check_rank(self, rank: str, incarnation: str) -> None:
        """Raises FencedError if a newer incarnation of this rank has said hello. The ranks of the running learner
        continue until the newer one has restored: its restore may be refused, and the run would have no learner."""
        name, peers = f"learner {rank}", self._state.peers
        runs = incarnation == peers.learner if name == LEADER else not peers.outlived(name, incarnation)
        if not runs:
            self._run.refuse_replaced(name, incarnation)

    def check_learner(self, incarnation: str) -> None:
        """Raises FencedError for a learner that was replaced, ReplayError for one that has not restored."""
        if incarnation in self._state.peers.past_learners:
            raise FencedError(REPLACED)
        if incarnation != self._state.peers.learner:
            raise ReplayError("this server knows no running learner. Restart the learner from its checkpoint")

    def publish(self, *, policy_version: int, parent: int) -> None:
        """Publish weights that no step trained: initial, or restored ones (the parent's own) under a new number."""
        if policy_version in self._state.tree:
            # A repeated request, perhaps long after. Refused if it means other weights; never moves the version back.
            self._state.tree.publish(policy_version, parent, length=0)
        else:
            # Checked on a copy before it is journalled: a record that cannot be applied would stop every recovery.
            copy.deepcopy(self._state.tree).publish(policy_version, parent, length=0, again=self._state.again)
            self._run.record(ev.Published(policy_version, parent))

    def lease(self, step: int) -> StepPlan | None:
        """Return the sealed batch of `step` (without shards); None while it cannot be sealed. Always the same plan.

        Raises:
            ReplayError: the step is committed, or more than one ahead of the next.
        """
        state, buffer = self._state, self._state.buffer
        if step < state.trained_steps:
            trained = buffer.trained.get(step)
            if trained is None or trained.evicted:
                raise ReplayError(
                    f"step {step} was trained and is no longer kept; the next step is {state.trained_steps}"
                )
            return trained.plan
        ahead = step - state.trained_steps
        if state.finished or ahead > 1:
            why = "the run is finished" if state.finished else f"step {state.trained_steps} is not trained"
            raise ReplayError(f"step {step} cannot be leased: {why}")
        plan = self._seal(step, ahead)
        if ahead == 0 and plan is not None:
            self._run.meter.idle.note(self._run.clock(), None)
        return plan

    def patience_mark(self, step: int) -> tuple[int, ...] | None:
        """Return a progress mark for a waiting `lease(step)`: groups inserted, steps trained, and a counter of tokens
        and environment steps of any worker. Its timeout restarts with each change, since one completion may take longer
        than the timeout. None: earlier steps are still to be trained, so it waits for the learner and not for rollouts.
        """
        mark = self._run.meter.inserted_groups, self._state.trained_steps, self._run.workers.moves
        return None if step > self._state.trained_steps else mark

    def trained(self, *, step: int, policy_version: int) -> TrainedReply:
        """Count a trained step and publish its version. Repeating the last call returns the same reply.

        Raises:
            ReplayError: `step` is not the next step, or was never leased.
        """
        state = self._state
        if self._last_trained and self._last_trained[:2] == (step, policy_version):
            return self._last_trained[2]
        if (step + 1, policy_version) == (state.trained_steps, state.version):
            # Repeated after the server was restarted: the step is counted, only the reply was lost.
            return TrainedReply(metrics=self._run.metrics(), evaluations=self._take_evaluations())
        sealed = state.buffer.untrained.get(step)
        if step != state.trained_steps or sealed is None:
            raise ReplayError(f"step {step} was not leased as the next step; the next is {state.trained_steps}")
        if policy_version <= state.tree.newest:
            raise ReplayError(
                f"policy_version {policy_version} is not above {state.tree.newest}: versions are never reused"
            )
        plan = sealed.plan
        before = {entry.group_id for entry in sealed.members if entry.trained}
        self._run.record(ev.Trained(step, policy_version))
        again = [entry.group_id for entry in sealed.members if self._may_reuse(entry)]
        if again:
            self._run.record(ev.Reused(tuple(again)))
        self._space.make_room()
        staleness = self._run.meter.train(plan, before)
        metrics = self._run.metrics() | staleness
        reply = TrainedReply(metrics=metrics, evaluations=self._take_evaluations())
        self._last_trained = (step, policy_version, reply)
        return reply

    def commit(self, step: int) -> None:
        """Record that the checkpoint of `step` is durable. Raises ReplayError if `step` was not trained."""
        if step >= self._state.trained_steps:
            raise ReplayError(f"step {step} cannot be committed: the next to be trained is {self._state.trained_steps}")
        if step > self._state.committed_step:
            self._run.record(ev.Committed(step))
            self._run.meter.commit(step)

    def announce(self, values: dict[str, Any]) -> None:
        self._run.record(ev.Announced(values))

    def evaluate(self, *, step: int, policy_version: int, eval_set: str, rows: int, chunk: int) -> int:
        asked = ev.EvaluationAsked(self._state.peers.next_job, step, policy_version, eval_set, rows, chunk)
        for job_id, known in self._state.peers.evaluations.items():
            if known == replace(asked, job_id=job_id):
                return job_id  # Repeated after the server was restarted before it could answer.
        superseded = self._run.evaluations.start(asked)
        self._run.record(asked)
        for older in superseded:
            self._run.record(ev.EvaluationClosed(older))
        return asked.job_id

    def evaluation_mark(self) -> tuple[int, int]:
        """Return a progress mark for evaluations: counters of results, and of tokens of any worker."""
        return self._run.evaluations.moves, self._run.workers.moves

    def finished_evaluations(self, incarnation: str = "", request: int = -1) -> tuple[EvalSummary, ...] | None:
        """Return the results not handed out before, once no evaluation is open; None until then. A repeated `request`
        gets the same results: its reply was lost, and they are stored nowhere else."""
        if request >= 0 and (incarnation, request) == self._handed_to:
            return self._handed_out
        return None if self._run.evaluations.open else self._take_evaluations((incarnation, request))

    def _take_evaluations(self, asked_by: tuple[str, int] = ("", -1)) -> tuple[EvalSummary, ...]:
        """Return the results not handed out yet, and close those handed out before: they have arrived, or the learner
        would not ask for more."""
        for summary in self._handed_out:
            self._run.record(ev.EvaluationClosed(summary.job_id))
        self._handed_out, self._handed_to = self._run.evaluations.take(), asked_by
        return self._handed_out

    def finish(self) -> None:
        """Drop open groups and tell workers to stop. Idempotent."""
        if self._state.finished:
            return
        for entry in list(self._state.ledger.entries.values()):
            if entry.state is GroupState.TRAINED:
                continue
            if entry.trained:
                self._run.record(ev.Retired(entry.group_id))
            else:
                self._retries.drop(entry, DropReason.SHUTDOWN)
        self._run.evaluations.cancel()
        self._run.record(ev.Finished())

    def snapshot(self) -> dict[str, Any]:
        return self._state.snapshot()

    def explain(self, step: int) -> str:
        """Return whom the learner waits for, and which workers are silent, as text."""
        why = why_no_batch(self._state, self._run.settings, self._run.workers, step)
        return "; ".join(part for part in (why, who_is_silent(self._run.workers, self._run.clock())) if part)

    def explain_evaluation(self) -> str:
        """Return what is missing of the open evaluations, and which workers are silent, as text."""
        silent = who_is_silent(self._run.workers, self._run.clock()) or "no rollout worker is connected"
        return f"{self._run.evaluations.waiting_rows()} rows are open; {silent}"

    def _may_reuse(self, entry: Entry) -> bool:
        if entry.state is not GroupState.TRAINED or entry.payload is None or entry.header is None:
            return False
        # After a resume with admission by group there may be members of groups begun by sample. Some of them could be
        # reused without the rest of their group.
        if entry.siblings or entry.trained >= self._run.settings.max_times_sampled:
            return False
        # A group over-age for the next step would only hold a slot that a new group could have.
        state = self._state
        return (
            min(state.tree.distance(v, state.version) for v in entry.header.versions)
            <= self._run.settings.max_staleness
        )

    def _left_behind(self, entry: Entry) -> bool:
        """Whether it was sampled with weights that are no ancestor of the learner's. Then it was not too slow: a resume
        went back to before those weights."""
        tree, version = self._state.tree, self._state.version
        sampled_by = entry.header.versions if entry.header else ()
        return any(not tree.leads_to(sampled, version) for sampled in sampled_by)

    def _seal(self, step: int, ahead: int) -> StepPlan | None:
        buffer = self._state.buffer
        sealed = buffer.untrained.get(step)
        if sealed is not None:
            return sealed.plan
        if ahead and self._seal(step - 1, ahead - 1) is None:
            return None  # Otherwise a later step could take the older groups.
        choice = choose_batch(self._state, self._run.settings, ahead=ahead)
        for group in choice.short:
            for entry in group:
                self._retries.drop(entry, DropReason.INCOMPLETE)
        for group in choice.stale:
            self._drop_stale(group)
        if choice.batch is None:
            if ahead == 0:
                self._run.meter.idle.note(
                    self._run.clock(), what_is_missing(self._state, self._run.settings, self._run.workers)
                )
            return None
        for group in groups_of(choice.batch):
            if group[0].siblings:
                rewards = [reward for entry in group if entry.header for reward in entry.header.member_rewards]
                self._run.meter.whole(rewards, missing=group[0].siblings - len(group))
        members = tuple(entry.group_id for entry in choice.batch)
        self._run.record(ev.Sealed(step, self._state.version, ahead, members, self._run.settings.max_staleness))
        return buffer.untrained[step].plan

    def _drop_stale(self, group: Group) -> None:
        """Drop all entries of a group as stale. The prompt of a group left behind by a resume is readmitted, once."""
        left = any(map(self._left_behind, group))
        reason = DropReason.DEAD_BRANCH if left else DropReason.STALE
        for entry in group:
            if entry.trained:
                self._run.record(ev.Retired(entry.group_id))
                continue
            if entry.header is not None:
                self._run.meter.drop_stale(entry.header, reason)
                self._run.on_stale(entry, reason)
            self._retries.drop(entry, reason, readmit=left and entry is group[0])

    def _reload(self, number: int, snapshot: dict[str, Any] | None) -> None:
        if snapshot is None and number < 0:
            raise ReplayError(
                f"this learner begins at step 0, but the replay server serves a run with {self._state.trained_steps} "
                "trained steps and a saved checkpoint. Start the learner with the folder of that run and resume=auto, "
                "or with a replay server of its own"
            )
        if snapshot is None:
            raise ReplayError(
                f"the learner's checkpoint is of step {number}, but this server knows steps "
                f"{self._state.committed_step}..{self._state.trained_steps - 1}, and the checkpoint has no replay "
                "snapshot. Resume from a newer checkpoint, or start with a new run folder"
            )
        if snapshot.get("step") != number:
            raise ReplayError(
                f"the replay snapshot is of step {snapshot.get('step')}, but the checkpoint is of step {number}"
            )
        ReplayState().apply(ev.Reloaded(snapshot))  # Checked on an empty state: an error after recording is too late.
        for member in self._run.workers.live.values():
            member.held.clear()
        self._run.record(ev.Reloaded(snapshot))
