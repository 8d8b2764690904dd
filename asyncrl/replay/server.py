"""The replay server: one thread, one ROUTER socket, everything else in `ReplayCore`; or in the host of a shard.

    consumes      requests of rollout workers and learner ranks
    waits for     the socket, at most until the next deadline of a waiting request
    unblocked by  any message; after each batch of them, waiting requests are asked again

With a journal a reply leaves once all that it rests on is durable (`outbox.py`); the loop never waits for that.
Replies go out with MANDATORY and DONTWAIT: to a peer that is gone or stuck they are lost, never waited for. The peer
learns from its next heartbeat what it has to ask again, so nothing hangs and nothing runs twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from asyncrl.errors import AsyncRLError, FencedError, NoProgress, WireError
from asyncrl.replay import messages, wire
from asyncrl.replay.columns import Frame
from asyncrl.replay.desk import ONCE, QUIET, SETTLED
from asyncrl.replay.doorkeeper import MAX_MALFORMED, STRANGER_BYTES, Doorkeeper, hang_up
from asyncrl.replay.durable import RESUME_S
from asyncrl.replay.host import ERROR_KINDS, ROLES, Clerk, Host
from asyncrl.replay.outbox import Outbox
from asyncrl.replay.session import Answer, Later, Session
from asyncrl.replay.socket_options import receive_routed
from asyncrl.replay.sync_thread import SyncThread
from asyncrl.replay.wire import Envelope

log = logging.getLogger(__name__)

BATCH = 256
"""Messages taken in before waiting requests and timers get their turn."""
BATCH_BYTES = 8 << 20
"""Likewise: a lease would wait for the checking of all the large groups that have come."""
THROWN_AWAY = 20 * BATCH
"""Likewise, counting those of connections that are heard no more."""
TICK_S = 0.2
MAX_PATIENT = 64
"""Requests of one peer that wait for something to happen; each is looked at with every change."""
MAX_REPLIES = 1024
"""Answers remembered for one peer. Without the oldest, a request asked again is run again, which changes nothing."""
GRACE_S = 1.0
"""After the last goodbye, so that a lost answer can still be asked for again."""
LEAVE_S = 5.0
"""How long a server whose run is over waits for its shards to hear of it; they ask several times a second."""


@dataclass(slots=True, eq=False)
class _Waiting:
    session: Session
    request: int
    verb: str
    later: Later
    deadline: float


class ReplayServer:
    """`boot` names this memory of the run, which outlives the process where there is a journal. A worker that worked
    for another one holds orders unknown here."""

    def __init__(
        self,
        core: Host,
        desk: Clerk,
        socket: zmq.Socket,
        *,
        run_id: str,
        boot: str,
        run_digest: str,
        silence_s: float,
        patience_s: float,
        sync: SyncThread | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core, self.desk, self.socket, self.clock = core, desk, socket, clock
        self.run_id, self.boot, self.run_digest, self.silence_s = run_id, boot, run_digest, silence_s
        self.sync, self.patience_s = sync, patience_s
        self.outbox = Outbox(socket, sync.journal if sync else None, clock)
        self.sessions: dict[str, Session] = {}
        self.malformed = 0
        self.door = Doorkeeper()
        self._waiting: list[_Waiting] = []
        self._changed = False
        """Something that waiting requests may depend on, other than an event of the core's state."""
        self._applied = 0
        """Events applied when they were last asked."""
        self._quiet_since: float | None = None
        # A run that was over before this start is being resumed, or its workers are still to be told.
        self._grace_s = RESUME_S if core.state.finished else GRACE_S

    def serve(self, stop: threading.Event) -> None:
        """Until `stop`, or until the run is finished and everybody has left."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        if self.sync is not None:
            poller.register(self.sync.wake_fd, zmq.POLLIN)
        next_tick, last_tick = 0.0, self.clock()
        while not stop.is_set():
            now = self.clock()
            if now >= next_tick:
                self.door.forgive(now - last_tick)
                last_tick, next_tick = now, now + TICK_S
                self._tick(now)
                if self._over(now):
                    return
            nearest = min((waiting.deadline for waiting in self._waiting), default=next_tick)
            if poller.poll(int(max(0.0, min(nearest, next_tick) - now) * 1000) + 1):
                self._drain()
            self._answer_waiting()
            self._settle_promises()

    def _settle_promises(self) -> None:
        if self.sync is None:
            return
        self.sync.nudge()
        self.sync.heard()
        problem = self.sync.journal.problem
        if problem != self.core.paused:
            self.core.paused, self._changed = problem, True
        self.outbox.release()
        for session, request in self.outbox.overdue(self.clock() - self.patience_s):
            why = problem or "the disk of the journal does not answer"
            text = f"nothing became durable at the replay server for {self.patience_s:.0f} s: {why}"
            self._send(session.identity, "no_progress", request, text)

    def _drain(self) -> None:
        nbytes = taken = 0
        for _ in range(THROWN_AWAY):
            try:
                connection, frames = receive_routed(self.socket)
            except zmq.Again:
                self.door.queue_is_empty()
                return
            identity = connection.bytes
            if not self.door.may_speak(identity, len(frames)):
                if self.door.must_close(identity):
                    hang_up(connection)
                continue
            self._take(identity, frames)
            taken += 1
            nbytes += sum(len(frame) for frame in frames)
            if taken == BATCH or nbytes > BATCH_BYTES:
                return

    def _take(self, identity: bytes, frames: Sequence[Frame]) -> None:
        """One message, whatever it is; nothing a peer sends may stop the server."""
        try:
            if not 1 <= len(frames) <= wire.MAX_FRAMES:
                raise WireError(f"a message of {len(frames)} frames")
            if len(frames[0]) > STRANGER_BYTES and self.door.is_stranger(identity):
                self._strange(identity, 0, sum(map(len, frames)))
                return
            envelope = wire.decode_envelope(frames[0])
        except WireError as error:
            self._malformed(identity, error)
            self._send(identity, "wire", 0, str(error))
            return
        if envelope.verb == "hello":
            self._hello(identity, envelope)
            return
        session = self.sessions.get(envelope.incarnation)
        if session is None:
            self._strange(identity, envelope.request, sum(map(len, frames)))
            return
        if envelope.run != self.run_id:
            self.door.malformed(identity)
            self._send(identity, "refused", envelope.request, f"this server serves run {self.run_id!r}")
            return
        self._heard(session, identity)
        self._request(session, envelope, frames[1:])

    def _strange(self, identity: bytes, request: int, nbytes: int) -> None:
        self.door.strange(identity, nbytes)
        self._send(identity, "unknown_peer", request, "say hello first")

    def _heard(self, session: Session, identity: bytes) -> None:
        self.door.seat(identity, session.incarnation, session.identity)
        session.identity, session.seen = identity, self.clock()

    def _hello(self, identity: bytes, envelope: Envelope) -> None:
        try:
            role, name, digest, served, boot = wire.sequence(envelope.body, "hello", 5)
            wire.text(role, "role", wire.MAX_NAME)
            wire.text(name, "name", wire.MAX_NAME)
            wire.text(digest, "run_digest", wire.MAX_NAME)
            wire.integer(served, "policy_version", -1, wire.MAX_VERSION)
            wire.text(boot, "boot", wire.MAX_NAME)
            if role not in ROLES or not envelope.incarnation:
                raise WireError(f"hello needs an incarnation and a role of {ROLES}, not {wire.short(role)}")
            if self.door.speaks_for(identity) not in ("", envelope.incarnation):
                raise WireError(f"{role} {wire.short(name)} says hello on the connection of another peer")
        except WireError as error:
            self._malformed(identity, error)
            self._send(identity, "wire", envelope.request, str(error))
            return
        if digest != self.run_digest or envelope.run not in ("", self.run_id):
            text = (
                f"{role} {name!r} was started with other settings than this server (run {self.run_id!r}): digest "
                f"{digest} there, {self.run_digest} here. Start all processes with the same overrides"
            )
            self._send(identity, "refused", envelope.request, text)
            return
        if role == "worker" and boot not in ("", self.boot):
            text = f"the replay server was restarted and does not know what {name!r} works on; start the worker anew"
            self._send(identity, "fenced", envelope.request, text)
            return
        try:
            if self.door.is_expelled(envelope.incarnation):
                raise FencedError(f"{role} {name!r} sent {MAX_MALFORMED} malformed messages; start it anew")
            if role == "worker":
                self.core.hello(name, envelope.incarnation, served)
            elif role == "learner":
                self.core.hello_learner(name, envelope.incarnation)
        except FencedError as error:
            self._send(identity, "fenced", envelope.request, str(error))
            return
        session = self.sessions.get(envelope.incarnation)
        if session is None:
            session = Session(role, name, envelope.incarnation, identity, self.clock())
            self.sessions[envelope.incarnation] = session
        self._heard(session, identity)
        self._changed = True
        welcome = self._envelope("ok", envelope.request, [self.run_id, self.boot, self.desk.window()])
        self.outbox.promise(session, envelope.request, [welcome])

    def _request(self, session: Session, envelope: Envelope, frames: Sequence[Frame]) -> None:
        request, verb = envelope.request, envelope.verb
        try:
            acknowledged, body = wire.sequence(envelope.body, "request", 2)
            wire.integer(acknowledged, "acknowledged", 0, wire.MAX_ID)
            for answered in [known for known in session.replies if known < acknowledged]:
                del session.replies[answered]
            session.acknowledged = max(session.acknowledged, acknowledged)
            # A late copy of what was answered: run again, an acquire would give orders to nobody.
            overtaken = request < session.acknowledged and verb != "heartbeat"
            if overtaken or request in session.waiting:
                return
            if request in session.replies:
                self.outbox.promise(session, request, session.replies[request])
            elif verb == "heartbeat":
                self._heartbeat(session, request, body)
            elif verb == "goodbye":
                self._goodbye(session, request)
            else:
                self._run(session, request, verb, body, frames)
        except AsyncRLError as error:
            if isinstance(error, WireError):
                self._malformed(session.identity, error, session)
            self._answer_error(session, request, error)

    def _run(self, session: Session, request: int, verb: str, body: object, frames: Sequence[Frame]) -> None:
        session.request = request
        reply = self.desk.handle(session, verb, body, frames)
        if verb not in QUIET:
            self._changed = True
        if isinstance(reply, Answer):
            self._answer(session, request, verb, reply)
        else:
            if session.patient >= MAX_PATIENT:
                raise WireError(f"{session.patient} requests of this peer wait already; one more is not taken")
            session.patient += 1
            session.waiting.add(request)
            deadline = self.clock() + reply.wait_s
            self._waiting.append(_Waiting(session, request, verb, reply, deadline))

    def _heartbeat(self, session: Session, request: int, body: object) -> None:
        stats, outstanding = wire.sequence(body, "heartbeat", 2)
        numbers = messages.numbers(stats, "stats")
        if session.role == "worker":
            self.core.heartbeat(session.name, session.incarnation, numbers)
        asked = [wire.integer(item, "request", 0, wire.MAX_ID) for item in wire.sequence(outstanding, "outstanding")]
        # Messages of one connection arrive in order: what is not here by now was lost, or its answer was.
        lost = [item for item in asked if item not in session.waiting]
        self._send(session.identity, "ok", request, [lost, self.desk.window(), self.core.state.applied])

    def _goodbye(self, session: Session, request: int) -> None:
        if session.role == "worker":
            self.core.goodbye(session.name, session.incarnation)
        self._forget(session)
        self._changed = True
        self.outbox.promise(session, request, [self._envelope("ok", request, None)])

    def _forget(self, session: Session) -> None:
        self.sessions.pop(session.incarnation, None)
        self.door.leave(session.identity)
        self._waiting = [waiting for waiting in self._waiting if waiting.session is not session]

    def _answer_waiting(self) -> None:
        """Ask the waiting requests again if anything has changed; end those whose time is up."""
        now = self.clock()
        while self._something_changed() or any(waiting.deadline <= now for waiting in self._waiting):
            changed, self._changed, self._applied = self._something_changed(), False, self.core.state.applied
            before, self._waiting = self._waiting, []
            for waiting in before:
                if not (changed or waiting.deadline <= now) or not self._settle(waiting, now):
                    self._waiting.append(waiting)

    def _something_changed(self) -> bool:
        return self._changed or self.core.state.applied != self._applied

    def _settle(self, waiting: _Waiting, now: float) -> bool:
        session, later = waiting.session, waiting.later
        try:
            answer = later.retry()
            if answer is None and waiting.deadline > now:
                return False
            final = answer or later.at_deadline()
            if isinstance(final, Later):
                waiting.later, waiting.deadline = final, now + final.wait_s
                return False
            session.waiting.discard(waiting.request)
            self._answer(session, waiting.request, waiting.verb, final)
        except AsyncRLError as error:
            session.waiting.discard(waiting.request)
            self._answer_error(session, waiting.request, error)
        session.patient -= 1
        return True

    def _tick(self, now: float) -> None:
        for name in self.core.expire():
            log.warning("worker %s was silent for %.1f s: its assignments go to others", name, self.silence_s)
            self._changed = True
        for session in [s for s in self.sessions.values() if now - s.seen > self.silence_s]:
            if session.role == "learner":
                log.warning("learner %s was silent for %.1f s: no step ends without it", session.name, self.silence_s)
            self._forget(session)

    def _over(self, now: float) -> bool:
        present = [session.role for session in self.sessions.values()]
        members = len(present) - present.count("shard")
        if not self.core.state.finished or members:
            self._quiet_since, self.desk.over = None, False
            self._grace_s = GRACE_S if members else self._grace_s
            return False
        self._quiet_since = self._quiet_since or now
        quiet_s = now - self._quiet_since
        self.desk.over = quiet_s > self._grace_s
        return self.desk.over and (not present or quiet_s > self._grace_s + LEAVE_S)

    def _answer(self, session: Session, request: int, verb: str, answer: Answer) -> None:
        frames: list[Frame] = [self._envelope("ok", request, answer.body), *answer.frames]
        if verb in ONCE:
            session.replies[request] = frames
            if len(session.replies) > MAX_REPLIES:
                del session.replies[next(iter(session.replies))]
        if verb in SETTLED:
            self.outbox.send(session.identity, frames)
        else:
            self.outbox.promise(session, request, frames)

    def _answer_error(self, session: Session, request: int, error: AsyncRLError) -> None:
        kind = next((name for kind, name in ERROR_KINDS.items() if isinstance(error, kind)), None)
        if kind is None:
            raise error  # LedgerError: a bug here, and going on would train on a broken ledger.
        frames = [self._envelope(kind, request, str(error))]
        if isinstance(error, NoProgress):
            self.outbox.send(session.identity, frames)  # It promises nothing, and must not wait for a full disk.
        else:
            self.outbox.promise(session, request, frames)

    def _malformed(self, identity: bytes, error: WireError, session: Session | None = None) -> None:
        self.malformed += 1
        known = session or self.sessions.get(self.door.speaks_for(identity))
        worker = known if known is not None and known.role == "worker" else None
        count = self.door.malformed(identity) if worker is None else worker.malformed + 1
        if count > MAX_MALFORMED:
            return
        peer = f"{known.role} {known.name!r}" if known else f"unknown peer {identity.hex()}"
        log.warning("refused a malformed message from %s (%d so far): %s", peer, self.malformed, error)
        if worker is None:
            return
        worker.malformed = count
        if count == MAX_MALFORMED and worker.incarnation in self.sessions:
            log.warning("%s sent %d malformed messages: its assignments go to others", peer, count)
            self.door.expel(identity, worker.incarnation)
            self.core.expel(worker.name, worker.incarnation)
            self._forget(worker)
            self._changed = True

    def _send(self, identity: bytes, kind: str, request: int, body: object) -> None:
        """An answer that rests on nothing durable."""
        self.outbox.send(identity, [self._envelope(kind, request, body)])

    def _envelope(self, kind: str, request: int, body: object) -> bytes:
        return wire.encode_envelope(
            Envelope(run=self.run_id, verb=kind, request=request, incarnation=self.boot, body=body)
        )
