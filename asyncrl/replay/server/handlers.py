"""Handlers of the wire verbs: check the arguments, call the core, encode the answer.

A handler returns an `Answer`, or a `Later` if there is no answer yet: the server calls `retry` after the next change,
and `at_deadline` when the caller's wait ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncrl.errors import WireError
from asyncrl.evaluation.orders import EvalResult
from asyncrl.recorded import FROM_ROLLOUT, REFERENCE, announced_routers, require_reference
from asyncrl.replay.codec import headers, messages, wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.group import MAX_VOCABULARY, check_stored, split_frames
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.protocol import Acquired
from asyncrl.replay.server.batches import Batches, announced
from asyncrl.replay.server.dropped import Dropped
from asyncrl.replay.server.sessions import Answer, Handler, Later, Reply, Session, now_or_later, while_it_moves
from asyncrl.spans import moment
from asyncrl.types import Assignment, DropReason, Routers

MAX_SLOTS = 65536

ONCE = frozenset({"acquire", "insert", "trained", "wait_evaluations", "evaluate", "restore"})
"""Verbs whose answers are kept: running one again for a request whose answer was lost would apply it twice."""
QUIET = frozenset({"heartbeat", "watch", "members", "snapshot", "acquire"})
"""Verbs that cannot unblock another waiting request."""


class Handlers:
    """The verbs of each role, over one `ReplayCore`."""

    def __init__(self, core: ReplayCore) -> None:
        self.core = core
        self.beside: Callable[[], Mapping[str, float]] = dict
        """Returns the server's own measurements, which are added to the metrics of a step."""
        self.dropped = Dropped(core.run)
        self.batches = Batches(core)
        self.worker_verbs: dict[str, Handler] = {
            "survey": self._survey,
            "acquire": self._acquire,
            "insert": self._insert,
            "fail": self._fail,
            "served": self._served,
            "report_evaluation": self._report_evaluation,
        }
        self.learner_verbs: dict[str, Handler] = {
            "restore": self._restore,
            "publish": self._publish,
            "trained": self._trained,
            "commit": self._commit,
            "snapshot": lambda session, body, frames: Answer(core.snapshot()),
            "evaluate": self._evaluate,
            "wait_evaluations": self._wait_evaluations,
            "announce": self._announce,
            "finish": self._finish,
        }
        self.rank_verbs: dict[str, Handler] = {
            "lease": self.batches.lease,
            "members": self._members,
        }
        """Verbs open to every rank of the learner, whether or not it is the one that restored."""
        self.shared_verbs: dict[str, Handler] = {"watch": self._watch}
        self.verbs_of: dict[str, tuple[dict[str, Handler], ...]] = {
            "worker": (self.worker_verbs, self.shared_verbs),
            "learner": (self.learner_verbs, self.rank_verbs, self.shared_verbs),
        }

    def handle(self, session: Session, verb: str, body: Any, frames: Sequence[Frame]) -> Reply:
        """Run one request of a peer.

        Raises:
            WireError: the protocol forbids it. ReplayError: the core refuses it.
        """
        if session.role == "learner":
            self.core.check_rank(session.name, session.incarnation)
        handler = next((verbs[verb] for verbs in self.verbs_of[session.role] if verb in verbs), None)
        if handler is None:
            raise WireError(f"a {session.role} has no verb {wire.short(verb)}")
        if session.role == "learner" and verb in self.learner_verbs and verb != "restore":
            self.core.check_learner(session.incarnation)
        return handler(session, body, frames)

    def limits(self) -> tuple[int, Routers | None]:
        """Return `(vocabulary size, routers)` for `check_stored`, as the learner announced them. Without an
        announcement the vocabulary is the largest possible."""
        return announced(self.core, "vocabulary") or MAX_VOCABULARY, announced_routers(self.core.board.values)

    def window(self) -> int:
        """Bytes that each producer may have unacknowledged: an even share of the free memory."""
        return -(-self.core.credit() // max(1, len(self.core.workers.live)))

    # ---- workers

    def _acquire(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        slots, wait_s = wire.sequence(body, "acquire", 2)
        wire.integer(slots, "slots", 0, MAX_SLOTS)
        request = session.request

        def ask() -> Acquired:
            return self.core.acquire(session.name, session.incarnation, slots, request)

        def retry() -> Answer | None:
            if not self.core.may_take(session.name, session.incarnation):
                return None
            acquired = ask()
            if acquired.assignments:
                moment("admit", groups=[each.group_id for each in acquired.assignments], worker=session.name)
            something = acquired.assignments or acquired.evaluations or acquired.stop
            return Answer(messages.encode_record(acquired)) if something else None

        late = lambda: Answer(messages.encode_record(ask()))  # noqa: E731
        return now_or_later(retry, late, wait_s, "work", self.core.has_work)

    def _survey(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        rows = [wire.integer(count, "rows", 1, wire.MAX_ID) for count in wire.sequence(body, "survey")]
        self.core.survey(session.name, session.incarnation, rows)
        return Answer()

    def _insert(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        row, sample = wire.sequence(body, "insert", 2)
        header = headers.decode_group_header(row, session.name)
        try:
            lost = messages.decode_lost(sample)
            if self.core.board.values.get(REFERENCE) == FROM_ROLLOUT:
                require_reference(header)
            stored = split_frames(header, frames)
            check_stored(header, stored, *self.limits())
        except WireError:
            # Otherwise the group would stay in flight for as long as its worker lives.
            self.core.fail(session.name, session.incarnation, header.group_id, header.attempt, DropReason.REJECTED)
            raise
        reply = self.core.insert(session.name, session.incarnation, header, stored)
        moment("inserted", groups=[header.group_id], status=reply.status)
        if reply.status == "accepted":
            self.dropped.member(lost, header)
        return Answer([*messages.encode_record(reply), self.window()])

    def _fail(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        row, reason, detail, rewards, sample = wire.sequence(body, "fail", 5)
        assignment = messages.decode_record(Assignment, row)
        said, why = wire.text(detail, "detail"), messages.decode_reason(reason)
        several = wire.sequence(rewards, "rewards", limit=wire.MAX_TRAJECTORIES)
        numbers = [wire.number(each, "reward") for each in several]
        whose = (session.name, session.incarnation, group := assignment.group_id, assignment.attempt)
        told = messages.decode_dropped(sample)
        held = group in (entries := self.core.state.ledger.entries)
        self.core.fail(*whose, why, said, numbers)
        if held and told is not None and group not in entries:  # otherwise it is retried
            self.dropped.told(replace(told, group_id=group, worker=session.name, dropped=why.value))
        return Answer()

    def _served(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        version, fingerprint = wire.sequence(body, "served", 2)
        wire.integer(version, "policy_version", 0, wire.MAX_VERSION)
        self.core.served(session.name, session.incarnation, version, wire.text(fingerprint, "fingerprint"))
        return Answer()

    def _report_evaluation(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        self.core.report_evaluation(session.name, session.incarnation, messages.decode_record(EvalResult, body))
        return Answer()

    # ---- shared

    def _watch(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        revision, wait_s = wire.sequence(body, "watch", 2)
        wire.integer(revision, "revision", -1, wire.MAX_ID)

        def board() -> Answer:
            return Answer(messages.encode_record(self.core.board))

        def is_another() -> bool:
            return self.core.board.revision != revision

        return now_or_later(
            lambda: board() if is_another() else None, board, wait_s, ("another board", revision), is_another
        )

    def _members(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        def members() -> Answer:
            return Answer([messages.encode_record(member) for member in self.core.members()])

        settle_s = self.core.settle_s()
        return members() if settle_s == 0 else Later(lambda: None, members, settle_s, "settled", lambda: False)

    # ---- learner

    def _restore(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        step, policy_version, snapshot, settings, branch, run = wire.sequence(body, "restore", 6)
        if step is not None:
            wire.integer(step, "step", 0, wire.MAX_ID)
        wire.integer(policy_version, "policy_version", -1, wire.MAX_VERSION)
        if snapshot is not None:
            wire.mapping(snapshot, "snapshot")
        restored = self.core.restore(
            step=step,
            policy_version=policy_version,
            snapshot=snapshot,
            incarnation=session.incarnation,
            settings=wire.text(settings, "settings", wire.MAX_NAME),
            branch=messages.boolean(branch, "branch"),
            run=wire.text(run, "run", wire.MAX_NAME),
            beside=session.beside,
        )
        return Answer(messages.encode_record(restored))

    def _publish(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        version, parent = wire.sequence(body, "publish", 2)
        wire.integer(version, "policy_version", 0, wire.MAX_VERSION)
        wire.integer(parent, "parent", -1, wire.MAX_VERSION)
        self.core.publish(policy_version=version, parent=parent)
        return Answer()

    def _trained(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        step, version = wire.sequence(body, "trained", 2)
        wire.integer(step, "step", 0, wire.MAX_ID)
        wire.integer(version, "policy_version", 0, wire.MAX_VERSION)
        reply = self.core.trained(step=step, policy_version=version)
        moment("trained", step=step + 1, version=version)
        row, dropped = {**reply.metrics, **self.beside()}, self.dropped.taken()
        return Answer(messages.encode_record(replace(reply, metrics=row, dropped=dropped)))

    def _commit(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        self.core.commit(wire.integer(body, "step", 0, wire.MAX_ID))
        moment("commit", step=body + 1)
        return Answer()

    def _evaluate(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        step, version, eval_set, rows, chunk = wire.sequence(body, "evaluate", 5)
        job = self.core.evaluate(
            step=wire.integer(step, "step", 0, wire.MAX_ID),
            policy_version=wire.integer(version, "policy_version", 0, wire.MAX_VERSION),
            eval_set=wire.text(eval_set, "eval_set", wire.MAX_NAME),
            rows=wire.integer(rows, "rows", 1, wire.MAX_TOKENS),
            chunk=wire.integer(chunk, "chunk", 1, wire.MAX_TOKENS),
        )
        return Answer(job)

    def _wait_evaluations(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        incarnation, request = session.incarnation, session.request

        def retry() -> Answer | None:
            summaries = self.core.finished_evaluations(incarnation, request)
            return None if summaries is None else Answer([messages.encode_record(summary) for summary in summaries])

        def is_over() -> bool:
            return not self.core.evaluations.open

        def silence() -> str:
            return f"no row and no token for {body:.1f} s: {self.core.explain_evaluation()}"

        return while_it_moves(retry, self.core.evaluation_mark, silence, body, "evaluations", is_over)

    def _announce(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        self.core.announce(wire.mapping(body, "board values"))
        return Answer()

    def _finish(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        self.core.finish()
        return Answer()
