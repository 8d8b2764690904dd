"""The client's end of the socket: one thread that owns a DEALER socket and sees every request through.

    consumes      requests from any thread of this process
    waits for     the server, and for byte credit before it sends a group
    unblocked by  replies; a heartbeat's reply names the requests that were lost, which are then sent again

A request keeps its id when it is resent, so it runs once. If the server is silent for longer than
`heartbeat_timeout_s`, a new socket is opened; for longer than `wait_timeout_s`, outstanding requests fail with
NoProgress.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import zmq

from asyncrl.checks.addresses import host_of, resolved
from asyncrl.errors import AsyncRLError, NoProgress, OtherSchemaError, RefusedPeerError, ReplayError, WireError
from asyncrl.replay.client.clocks import Clocks
from asyncrl.replay.client.handshakes import Handshakes
from asyncrl.replay.client.requests import Request, Requests, Response
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.messages import decode_record, encode_record
from asyncrl.replay.codec.reply import Hello, Pulse, Welcome, decode_replies, error_of, window_after
from asyncrl.replay.codec.together import encode_requests
from asyncrl.replay.codec.wire import Envelope
from asyncrl.replay.net.clock import awake_clock
from asyncrl.replay.net.doors import Doors, open_door
from asyncrl.replay.net.keys import secure_client
from asyncrl.replay.net.socket_options import receive, send, set_socket_options
from asyncrl.replay.net.wakeup import Wakeup
from asyncrl.settings.replay import ReplayConfig
from asyncrl.types import NO_VERSION

log = logging.getLogger(__name__)

CONTROL_KEPT = 10_000
"""Number of later requests after which a hello or heartbeat without an answer is forgotten."""
GOODBYE_S = 2.0
"""Seconds that `close` waits for the server to acknowledge the goodbye."""

TURNED_AWAY = 1000
"""Limit on consecutive demands of a server for another hello, without an answer to anything else, before it counts as
broken. A working server does it once."""


class Connection:
    """See the module docstring. `stats` is called for every heartbeat, in the thread of the connection."""

    def __init__(
        self,
        address: str,
        *,
        role: str,
        name: str,
        run_digest: str,
        config: ReplayConfig,
        stats: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self.address, self.role, self.name = address, role, name
        self._server = f"replay server at {address}"
        self.incarnation = uuid.uuid4().hex
        self.served = NO_VERSION
        """Newest policy version served, sent with every hello."""
        self._digest, self._config, self._stats = run_digest, config, stats
        self._context = zmq.Context(1)
        self._inbox: deque[Request] = deque()
        self._requests = Requests()
        self._next = 1
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._fatal: AsyncRLError | None = None
        self._run, self._boot = "", ""
        self._welcome = False
        self._turned_away = 0
        self._suspicion = ""
        """Why the last socket received nothing, as far as its handshakes show."""
        self._control: dict[int, str] = {}
        """Verbs of unanswered hellos and heartbeats, by request number; they are never resent."""
        self._clocks = Clocks()
        self._clock = awake_clock(config)
        self._contact = self._attempt = self._clock()
        self._wakeup = Wakeup()
        self._door: Doors | None = None
        """The door through which the socket is connected; None for tcp."""
        self._knocks = config.local_sockets
        """Whether to look for a door."""
        self._socket, self._handshakes, self._poller = self._open()
        self._thread = threading.Thread(target=self._main, name=f"replay-{name}", daemon=True)
        self._thread.start()

    def request(self, verb: str, body: Any = None, frames: Sequence[Frame] = (), nbytes: int = 0) -> Future[Response]:
        """Send a request and see it through. The future fails with the server's error, or with NoProgress."""
        future: Future[Response] = Future()
        future.set_running_or_notify_cancel()  # A sent request cannot be cancelled: the server may act on it.
        with self._lock:
            if self._fatal is not None or self._closing.is_set():
                future.set_exception(self._fatal or ReplayError(f"the connection to {self.address} was closed"))
                return future
            number, self._next = self._next, self._next + 1
            self._inbox.append(Request(number, verb, body, frames, nbytes, future, self._clock()))
            self._wakeup.ring()
        return future

    def close(self) -> None:
        """Say goodbye (in bounded time) and stop the thread. Outstanding requests fail. Safe to call twice."""
        if self._closing.is_set():
            return
        if self._fatal is None and self._welcome:
            goodbye = self.request("goodbye")
            try:
                goodbye.exception(timeout=GOODBYE_S)
            except TimeoutError:
                log.debug("%s did not acknowledge that %s disconnects", self.address, self.name)
        with self._lock:
            self._closing.set()
            self._wakeup.ring()
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():  # Otherwise the context would wait for the thread's socket forever.
            self._wakeup.close()
            self._context.term()

    # ---- the thread

    def _main(self) -> None:
        error: BaseException | None = None
        try:
            self._loop()
        # The boundary of the thread: its failure must reach the waiting callers, or they would wait forever.
        except Exception as failure:
            log.exception("the connection to %s failed", self.address)
            error = failure
        closed = ReplayError(f"the connection to the {self._server} was closed")
        closed.__cause__ = error
        self._fail_all(closed)
        self._close_socket()

    def _loop(self) -> None:
        next_beat = 0.0
        while not self._closing.is_set():
            now = self._clock()
            if now >= min(next_beat, self._deaf_at()):
                next_beat = now + self._config.heartbeat_s
                self._beat(now)
            ready = dict(self._poller.poll(int(max(0.0, min(next_beat, self._deaf_at()) - now) * 1000) + 1))
            if self._wakeup.fd in ready:
                self._take_inbox()
            if self._handshakes.monitor in ready:
                self._handshakes.hear()
                if self._handshakes.refused:
                    kind = ReplayError if self._run else RefusedPeerError  # as below
                    self._die(kind(f"the {self._server} {self._handshakes.refused}"))
            if self._socket in ready:
                self._receive()
            if self._welcome:
                self._requests.send(self._dispatch)

    def _open(self) -> tuple[zmq.Socket, Handshakes, zmq.Poller]:
        socket = self._context.socket(zmq.DEALER)
        set_socket_options(socket, self.address, self._config.heartbeat_s, self._config.heartbeat_timeout_s)
        self._door = open_door(self._config.keys, self.address, self.role) if self._knocks else None
        if self._door is None:
            secure_client(socket, self._config.keys, self.role)
        handshakes = Handshakes(socket, self._config.keys, self.role)
        socket.connect(self.address if self._door is None else f"ipc://{self._door.path(self.role)}")
        poller = zmq.Poller()
        for each in (self._wakeup.fd, socket, handshakes.monitor):
            poller.register(each, zmq.POLLIN)
        return socket, handshakes, poller

    def _close_socket(self) -> None:
        self._handshakes.close()
        self._socket.close(0)
        if self._door is not None:
            self._door.close()
            self._door = None

    def _has_door(self) -> bool:
        door = open_door(self._config.keys, self.address, self.role)
        if door is not None:
            door.close()
        return door is not None

    def _open_anew(self) -> None:
        self._attempt = self._clock()
        self._close_socket()
        self._socket, self._handshakes, self._poller = self._open()
        self._welcome = False

    def _beat(self, now: float) -> None:
        """Once per heartbeat: send a heartbeat or another hello, and give up on requests that waited too long."""
        # If this process was slow itself, messages of the server may be unread.
        if now >= self._deaf_at() and not self._socket.poll(0):
            why = self._suspicion = self._handshakes.suspicion or self._nowhere()
            log.warning("no word from the %s for %.1f s: reconnecting%s", self._server, now - self._contact, why)
            # The process that listens at a door and stays silent may be another one than the server at the tcp address.
            self._knocks = self._config.local_sockets and not (self._door and self._door.is_open(self.role))
            self._open_anew()
        if self._welcome:
            self._say("heartbeat", [0, [self._stats() | self._clocks.stats(), self._requests.sent()]])
        elif self._fatal is None:
            self._hello()
        self._give_up(now)

    def _nowhere(self) -> str:
        host = host_of(self.address)
        return f"; this machine knows no address of {host}" if host and not resolved(host) else ""

    def _deaf_at(self) -> float:
        """Return the time at which the server counts as silent, one heartbeat early: the next one could be too late."""
        return max(self._contact, self._attempt) + self._config.heartbeat_timeout_s - self._config.heartbeat_s

    def _hello(self) -> None:
        self._say("hello", encode_record(Hello(self.role, self.name, self._digest, self.served, self._boot)))

    def _say(self, verb: str, body: Any) -> None:
        with self._lock:
            number, self._next = self._next, self._next + 1
        self._control = {known: name for known, name in self._control.items() if known > number - CONTROL_KEPT}
        self._control[number] = verb
        self._clocks.sent(number)
        self._send(verb, number, body)

    def _take_inbox(self) -> None:
        self._wakeup.heard()
        while self._inbox:
            self._requests.add(self._inbox.popleft())

    def _dispatch(self, together: Sequence[Request]) -> bool:
        return self._send(*encode_requests(together, self._requests.oldest))

    def _send(self, verb: str, number: int, body: Any, frames: Sequence[Frame] = ()) -> bool:
        envelope = Envelope(run=self._run, verb=verb, request=number, incarnation=self.incarnation, body=body)
        header = wire.encode_envelope(envelope)
        if len(header) > wire.MAX_REQUEST_BYTES:
            raise WireError(f"{verb} needs a header of {len(header)} bytes; the limit is {wire.MAX_REQUEST_BYTES}")
        try:
            send(self._socket, [header, *frames])
        except zmq.Again:
            return False
        return True

    def _receive(self) -> None:
        while True:
            try:
                frames = receive(self._socket)
            except zmq.Again:
                return
            try:
                replies = decode_replies(frames)
            except OtherSchemaError as error:
                self._die(RefusedPeerError(f"the server at {self.address}: {error}"))
                return
            except WireError as error:
                self._die(WireError(f"the server at {self.address} sent an invalid reply: {error}"))
                return
            self._contact = self._clock()
            for envelope, payload in replies:
                self._answered(envelope, payload)

    def _answered(self, envelope: Envelope, frames: Sequence[Frame]) -> None:
        request = self._requests.get(envelope.request)
        if envelope.verb == "unknown_peer":
            self._introduce()
        elif request is not None:
            self._turned_away = 0
            self._finish(request, envelope, frames)
        elif envelope.request in self._control:
            self._hear(self._control.pop(envelope.request), envelope)

    def _introduce(self) -> None:
        """Send another hello: the server does not know this client (any more)."""
        if self._welcome:
            self._welcome = False
            self._turned_away += 1
            self._hello()
        if self._turned_away > TURNED_AWAY:
            self._die(ReplayError(f"the {self._server} asked for a hello {self._turned_away} times, but answered none"))

    def _hear(self, verb: str, reply: Envelope) -> None:
        """Handle the reply to a hello or heartbeat. An invalid one ends the connection."""
        if reply.verb != "ok":
            error = error_of(self._server, reply)
            if verb == "hello" and reply.verb == "refused" and not self._run:  # not if it was admitted before
                error = RefusedPeerError(str(error))
            if verb == "hello" or reply.verb in ("fenced", "refused"):
                self._die(error)
            return
        try:
            if verb == "hello":
                self._welcomed(decode_record(Welcome, reply.body))
            else:
                pulse = decode_record(Pulse, reply.body)
                self._clocks.heard(reply.request, pulse.time)
                self._beaten(pulse)
        except WireError as error:
            self._die(WireError(f"{self._server}: {error}"))

    def _welcomed(self, welcome: Welcome) -> None:
        if self._door is None and self._knocks and self._has_door():  # The door was opened after the socket.
            self._open_anew()
            self._hello()
            return
        self._run, self._boot, self._requests.window = welcome.run, welcome.boot, welcome.window
        self._welcome = True
        self._requests.resend_all()

    def _beaten(self, pulse: Pulse) -> None:
        self._turned_away = 0
        self._requests.window = pulse.window
        self._requests.server_at(pulse.progress, self._contact)
        self._requests.resend(pulse.lost)

    def _finish(self, request: Request, envelope: Envelope, frames: Sequence[Frame]) -> None:
        self._requests.answered(request)
        if envelope.verb != "ok":
            error = error_of(self._server, envelope)
            if envelope.verb == "refused":
                self._die(error)
            request.future.set_exception(error)
            return
        try:
            if request.nbytes:
                self._requests.window = window_after(envelope.body)
        except WireError as error:
            request.future.set_exception(WireError(f"{self._server}: {error} ({request.verb})"))
            return
        request.future.set_result(Response(envelope.body, frames))

    def _give_up(self, now: float) -> None:
        for request, waited in self._requests.take_overdue(now, self._contact, self._config.wait_timeout_s):
            what = "did not answer" if not self._welcome or request.sent else "granted no bytes"
            text = f"the {self._server} {what} for {waited:.0f} s ({request.verb})"
            request.future.set_exception(NoProgress(f"{text}{self._handshakes.suspicion or self._suspicion}"))

    def _die(self, error: AsyncRLError) -> None:
        self._fail_all(error)
        self._welcome = False

    def _fail_all(self, error: AsyncRLError) -> None:
        with self._lock:
            self._fatal = error
            requests = [*self._requests.take_all(), *self._inbox]
            self._inbox.clear()
        for request in requests:
            request.future.set_exception(error)
