"""Event loop of the replay server: one thread and its ROUTER sockets. All state is in `ReplayCore`.

    consumes      requests of rollout workers and learner ranks
    waits for     the sockets, at most until the next deadline of a waiting request
    unblocked by  any message; after each batch of messages, waiting requests are retried

With a journal, a reply leaves once everything it depends on is durable (`outbox.py`); the loop never waits for that.
Replies are sent with MANDATORY and DONTWAIT: a reply to a peer that is gone or stuck is lost, never waited for. The
peer's next heartbeat tells it what to repeat, so nothing hangs and nothing runs twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from asyncrl import spans
from asyncrl.errors import AsyncRLError, FencedError, OtherSchemaError, WireError
from asyncrl.replay.codec import messages, wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.reply import Hello, Pulse, ServerTime, Welcome, decode_hello
from asyncrl.replay.codec.together import Asked, decode_requests
from asyncrl.replay.codec.wire import Envelope
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.journal.sync_thread import SyncThread
from asyncrl.replay.server.handlers import QUIET, Handlers
from asyncrl.replay.server.idle import Idle
from asyncrl.replay.server.outbox import Outbox, Replies
from asyncrl.replay.server.router import Entrance, hang_up
from asyncrl.replay.server.sessions import TICK_S, Answer, Session, silence_of
from asyncrl.replay.server.shutdown import Shutdown
from asyncrl.replay.server.waiting import WaitingRequests
from asyncrl.settings.replay import ReplayConfig
from asyncrl.storage.memory import free_share

log = logging.getLogger(__name__)

BATCH = 256
"""Limit on requests read before waiting requests and timers get their turn."""
BATCH_BYTES = 8 << 20
"""The same limit in bytes: otherwise a lease would wait until all large groups that have arrived are checked."""
HANG_UP_S = 0.5
"""Seconds from the refusal of what is no message to the end of its connection."""
DISCARDED = 20 * BATCH
"""The same limit in messages, including those of connections that are about to be closed."""
MACHINE: dict[str, Callable[[Sequence[float]], float]] = {"memory_free": min, "clock_skew_s": max}
"""Measurements of their machine that peers send with a heartbeat (`client.clocks`), and how to take the worst."""


class ReplayServer:
    """Serves a run until it is over. `boot` identifies this memory of the run, which outlives the process if
    there is a journal. A worker that worked for another boot holds assignments unknown here."""

    def __init__(
        self,
        core: ReplayCore,
        handlers: Handlers,
        entrance: Entrance,
        config: ReplayConfig,
        *,
        run_id: str,
        boot: str,
        run_digest: str,
        sync: SyncThread | None = None,
    ) -> None:
        self.core, self.handlers, self.entrance, self.clock = core, handlers, entrance, core.clock
        self.run_id, self.boot, self.run_digest, self.sync = run_id, boot, run_digest, sync
        self.silence_s, self.patience_s = silence_of(config), config.wait_timeout_s
        self.outbox = Outbox(entrance, sync.journal if sync else None, self.clock)
        self.sessions: dict[str, Session] = {}
        self.malformed = 0
        self._speakers: dict[bytes, str] = {}
        """Connection -> incarnation of the live peer that it speaks for."""
        self._broken: dict[bytes, tuple[zmq.Frame, float]] = {}
        """Connections that sent something other than a message, and when each is closed: at once, it would lose the
        refusal. What it sends until then is discarded."""
        self.replies = Replies(self.outbox, run_id, boot)
        self.waiting = WaitingRequests(lambda: core.state.applied, self.replies, self.clock)
        self.shutdown = Shutdown(core.state.finished)
        self.idle, self._kernel = Idle(), spans.boot()

    def serve(self, stop: threading.Event) -> None:
        """Serve until `stop` is set, or until the run is finished and everybody has left."""
        poller = zmq.Poller()
        for socket in self.entrance.sockets:
            poller.register(socket, zmq.POLLIN)
        if self.sync is not None:
            poller.register(self.sync.wakeup.fd, zmq.POLLIN)
        next_tick = 0.0
        while not stop.is_set():
            now = self.clock()
            if now >= next_tick:
                next_tick = now + TICK_S
                self._tick(now)
                if self._over(now):
                    return
            with self.idle:
                ready = dict(poller.poll(int(max(0.0, min(self.waiting.nearest(), next_tick) - now) * 1000) + 1))
            if self.entrance.heard(ready):
                self._drain()
            if self.sync is not None and self.sync.wakeup.fd in ready:
                self.sync.heard()
            self.waiting.settle()
            self._settle_promises()

    def _settle_promises(self) -> None:
        if self.sync is None:
            self.outbox.release()
            return
        self.sync.nudge()
        self.outbox.release()
        for session, request in self.outbox.overdue(self.clock() - self.patience_s):
            text = (
                f"the replay server made nothing durable for {self.patience_s:.0f} s: the disk of the journal "
                "does not respond"
            )
            self.replies.send(session.identity, "no_progress", request, text)

    def _drain(self) -> None:
        nbytes = taken = 0
        for _ in range(DISCARDED):
            try:
                identity, connection, role, frames = self.entrance.receive()
            except zmq.Again:
                return
            if identity in self._broken:
                continue
            taken += self._take(identity, connection, role, frames)
            nbytes += sum(map(len, frames))
            if taken >= BATCH or nbytes > BATCH_BYTES:
                return

    def _take(self, identity: bytes, connection: zmq.Frame, role: str, frames: Sequence[Frame]) -> int:
        """Handle one message from a connection with the key of `role`; return the number of requests in it, or 1.
        Nothing that a peer sends may stop the server."""
        try:
            if not 1 <= len(frames) <= wire.MAX_FRAMES:
                raise WireError(f"a message of {len(frames)} frames")
            envelope = wire.decode_envelope(frames[0])
        except WireError as error:
            self._malformed(identity, error)
            self.replies.turn_away(identity, "wire", 0, str(error))
            if not isinstance(error, OtherSchemaError):  # another version of asyncrl, which is told so
                self._disconnect(identity, connection)
            return 1
        if envelope.verb == "hello":
            self._hello(identity, role, envelope)
            return 1
        session = self.sessions.get(envelope.incarnation)
        if session is None:
            self.replies.turn_away(identity, "unknown_peer", envelope.request, "say hello first")
            return 1
        if envelope.run != self.run_id or session.role != role:
            text = (
                f"a connection opened with a {role}'s key is not one of this {session.role}, or belongs to another run"
            )
            self.replies.turn_away(identity, "refused", envelope.request, text)
            return 1
        self._heard(session, identity)
        return self._requests(session, envelope, frames[1:])

    def _heard(self, session: Session, identity: bytes) -> None:
        if session.identity != identity:
            self._speakers.pop(session.identity, None)
        self._speakers[identity] = session.incarnation
        session.identity, session.seen = identity, self.clock()

    def _hello(self, identity: bytes, key_role: str, envelope: Envelope) -> None:
        """Admit or refuse a peer. A refusal contains nothing that the peer has not sent itself: with the run and its
        digest it could get in."""
        try:
            hello = decode_hello(envelope)
            if self._speakers.get(identity, envelope.incarnation) != envelope.incarnation:
                raise WireError(f"{hello.role} {wire.short(hello.name)} said hello on the connection of another peer")
        except WireError as error:
            self._malformed(identity, error)
            self.replies.turn_away(identity, "wire", envelope.request, str(error))
            return
        refused = self._refused(hello, key_role, envelope.run)
        if refused:
            log.warning("refused %s %r: %s", hello.role, hello.name, refused)
            self.replies.turn_away(identity, "refused", envelope.request, refused)
            return
        try:
            self._welcome(hello, envelope.incarnation)
        except FencedError as error:
            self.replies.turn_away(identity, "fenced", envelope.request, str(error))
            return
        session = self.sessions.get(envelope.incarnation)
        if session is None:
            session = Session(hello.role, hello.name, envelope.incarnation, identity, self.clock())
            session.beside = self._note_second(hello.name) if hello.role == "learner" else ()
            self.sessions[envelope.incarnation] = session
        self._heard(session, identity)
        welcome = messages.encode_record(Welcome(self.run_id, self.boot, self.handlers.window()))
        self.waiting.changed = True
        self.replies.promise(session, envelope.request, welcome)

    def _refused(self, hello: Hello, key_role: str, run: str) -> str:
        """Return why this peer can never be admitted; empty if it can."""
        if hello.role != key_role:
            return (
                f"its key is that of a {key_role}, but it says that it is a {hello.role}. Give each role its own secret"
            )
        if hello.digest != self.run_digest or run not in ("", self.run_id):
            log.warning("%s %r has digest %s, run %r; here they are %s, %r", hello.role, hello.name, hello.digest, run,
                        self.run_digest, self.run_id)  # fmt: skip
            return (
                f"{hello.role} {hello.name!r} was started with other settings than this server, or for another run. "
                f"Start all processes with the same overrides (its settings digest is {hello.digest}; that of the "
                "server is in the server's log)"
            )
        return ""

    def _welcome(self, hello: Hello, incarnation: str) -> None:
        """Report an admitted peer to the core. Raises FencedError if this incarnation was replaced, worked for another
        boot or has another role here."""
        if hello.role == "worker" and hello.boot not in ("", self.boot):
            raise FencedError(
                f"the replay server was restarted and does not know what {hello.name!r} works on. Restart it"
            )
        known = self.sessions.get(incarnation)
        if known is not None and known.role != hello.role:
            raise FencedError(f"{hello.role} {hello.name!r}: a {known.role} of this name is already connected")
        if hello.role == "worker":
            self.core.hello(hello.name, incarnation, hello.served)
        elif hello.role == "learner":
            self.core.hello_learner(hello.name, incarnation)

    def _note_second(self, rank: str) -> list[str]:
        """Return the incarnations of this rank that are present, and log each. Without the log, two learners that are
        both restarted would fence each other forever and nobody would know why."""
        found = list[str]()
        for each in self.sessions.values():
            silent_s = self.clock() - each.seen
            if each.role == "learner" and each.name == rank and silent_s < self.silence_s / 3:
                found.append(each.incarnation)
                log.warning(
                    "learner %s connected, and another was heard %.1f s ago. Once the new one has restored, requests "
                    "of the other are refused. If both run, stop one of them: a run has one learner",
                    rank, silent_s,
                )  # fmt: skip
        return found

    def _requests(self, session: Session, envelope: Envelope, frames: Sequence[Frame]) -> int:
        """Run all requests of one message; return how many there were."""
        try:
            acknowledged, asked = decode_requests(envelope, frames)
        except WireError as error:
            self._malformed(session.identity, error, session)
            self.replies.error(session, envelope.request, error)
            return 1
        for answered in [known for known in session.replies if known < acknowledged]:
            del session.replies[answered]
        session.acknowledged = max(session.acknowledged, acknowledged)
        for each in asked:
            self._request(session, each)
            if session.incarnation not in self.sessions:  # it said goodbye, or was thrown out
                break
        return len(asked)

    def _request(self, session: Session, asked: Asked) -> None:
        request, verb = asked.number, asked.verb
        try:
            # A late copy of an answered request. If run again, an acquire would assign groups to nobody.
            if (request < session.acknowledged and verb != "heartbeat") or request in session.waiting:
                return
            if request in session.replies:
                self.replies.again(session, request)
            elif verb == "heartbeat":
                self._heartbeat(session, request, asked.body)
            elif verb == "goodbye":
                self._goodbye(session, request)
            else:
                self._run(session, request, verb, asked.body, asked.frames)
        except (AsyncRLError, RecursionError) as raised:  # The second: lists nested too deep to print.
            error = raised if isinstance(raised, AsyncRLError) else WireError(f"{wire.short(verb)} is nested too deep")
            if isinstance(error, WireError):
                self._malformed(session.identity, error, session)
            self.replies.error(session, request, error)

    def _run(self, session: Session, request: int, verb: str, body: object, frames: Sequence[Frame]) -> None:
        session.request = request
        reply = self.handlers.handle(session, verb, body, frames)
        if verb not in QUIET:
            self.waiting.changed = True
        if isinstance(reply, Answer):
            self.replies.answer(session, request, verb, reply)
        else:
            self.waiting.add(session, request, verb, reply)

    def _heartbeat(self, session: Session, request: int, body: object) -> None:
        stats, outstanding = wire.sequence(body, "heartbeat", 2)
        numbers = messages.numbers(stats, "stats")
        session.machine = {name: numbers[name] for name in MACHINE if name in numbers}
        if session.role == "worker":
            self.core.heartbeat(session.name, session.incarnation, numbers)
        asked = [wire.integer(item, "request", 0, wire.MAX_ID) for item in wire.sequence(outstanding, "outstanding")]
        # Messages of one connection arrive in order: a request that is not here by now was lost, or its answer was.
        lost = [item for item in asked if item not in session.waiting]
        clocks = ServerTime(self._kernel, time.monotonic_ns(), time.time_ns())
        pulse = Pulse(lost, self.handlers.window(), self.core.state.applied, clocks)
        self.replies.send(session.identity, "ok", request, messages.encode_record(pulse))

    def measured(self) -> dict[str, float]:
        """Return the measurements for the metrics of a step: the idle share of this process, and the worst value over
        the machines of all peers."""
        row = {"idle/replay": self.idle.share()}
        told = [{"memory_free": free_share()}, *(session.machine for session in self.sessions.values())]
        for name, worst in MACHINE.items():
            values = [value for each in told if (value := each.get(name)) is not None]
            row |= {f"machine/{name}": worst(values)} if values else {}
        return row

    def _goodbye(self, session: Session, request: int) -> None:
        if session.role == "worker":
            self.core.goodbye(session.name, session.incarnation)
        self._forget(session)
        self.waiting.changed = True
        self.replies.promise(session, request, None)

    def _forget(self, session: Session) -> None:
        self.sessions.pop(session.incarnation, None)
        self._speakers.pop(session.identity, None)
        self.waiting.forget(session)

    def _tick(self, now: float) -> None:
        for identity, (connection, at) in list(self._broken.items()):
            if now >= at:
                hang_up(connection)
                del self._broken[identity]
        for name in self.core.expire():
            log.warning("worker %s was silent for %.1f s. Its assignments go to other workers", name, self.silence_s)
            self.waiting.changed = True
        for session in [s for s in self.sessions.values() if now - s.seen > self.silence_s]:
            if session.role == "learner":
                log.warning("learner %s was silent for %.1f s. No step ends without it", session.name, self.silence_s)
            self._forget(session)

    def _over(self, now: float) -> bool:
        return self.shutdown.look(self.core.state.finished, bool(self.sessions), now)

    def _malformed(self, identity: bytes, error: WireError, session: Session | None = None) -> None:
        self.malformed += 1
        known = session or self.sessions.get(self._speakers.get(identity, ""))
        peer = f"{known.role} {known.name!r}" if known else f"unknown peer {identity.hex()}"
        log.warning("refused a malformed message from %s (%d so far): %s", peer, self.malformed, error)

    def _disconnect(self, identity: bytes, connection: zmq.Frame) -> None:
        """Close a connection that sent something other than a message, and end the session of its peer."""
        self._broken[identity] = connection, self.clock() + HANG_UP_S
        session = self.sessions.get(self._speakers.get(identity, ""))
        if session is None:
            return
        log.warning("%s %r is disconnected: what it sent is no message of the protocol", session.role, session.name)
        if session.role == "worker":
            self.core.expel(session.name, session.incarnation)
        self._forget(session)
        self.waiting.changed = True
