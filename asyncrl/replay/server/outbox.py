"""Outgoing replies: encoded in envelopes of the run, queued, and kept until the peer has acknowledged them. The replies
of one turn of the server's loop leave together. A reply that depends on events the journal has not yet made durable is
held until it has.

consumes      replies of the server, in order
waits for     the journal's sync, never on the loop's time
unblocked by  `release`, after each turn of the server's loop; `overdue`, for a learner that has waited too long
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from asyncrl.errors import AsyncRLError, NoProgress
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.reply import ERRORS
from asyncrl.replay.codec.wire import SEVERAL, Envelope
from asyncrl.replay.core.requests.rollouts import UnknownPeer
from asyncrl.replay.journal.log import SegmentLog
from asyncrl.replay.server.handlers import ONCE
from asyncrl.replay.server.router import Entrance
from asyncrl.replay.server.sessions import Answer, Session

log = logging.getLogger(__name__)

TOGETHER = 256
"""Limit on replies in one message."""
MAX_REPLIES = 1024
"""Limit on answers kept for one peer. A repeated request whose answer was discarded is run again, which changes
nothing."""
ERROR_KINDS = ((UnknownPeer, "unknown_peer"), *((kind, name) for name, kind in ERRORS.items()))
"""Errors that are sent to the peer, by their names in a reply."""


@dataclass(frozen=True, slots=True)
class _Held:
    position: int
    session: Session
    request: int
    frames: Sequence[Frame]
    since: float


class Outbox:
    """Holds replies until what they depend on is durable.

    Args:
        clock: the server's clock. With another one, a standstill of the server would count against the journal.
    """

    def __init__(self, way_out: Entrance, journal: SegmentLog | None, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._way_out, self._journal = way_out, journal
        self._held: deque[_Held] = deque()

    def promise(self, session: Session, request: int, frames: Sequence[Frame]) -> None:
        """Queue a reply for the first `release` after everything that happened so far is durable. Until then the
        request counts as waiting."""
        position = 0 if self._journal is None else self._journal.promised
        session.waiting.add(request)
        self._held.append(_Held(position, session, request, frames, self._clock()))

    def release(self) -> None:
        """Send the replies whose events have become durable, each to its peer's current connection. Single-frame
        replies to one peer share messages."""
        mail: dict[bytes, list[Sequence[Frame]]] = {}
        durable = 0 if self._journal is None else self._journal.durable
        while self._held and self._held[0].position <= durable:
            held = self._held.popleft()
            held.session.waiting.discard(held.request)
            mail.setdefault(held.session.identity, []).append(held.frames)
        for identity, replies in mail.items():
            short = [frames[0] for frames in replies if len(frames) == 1]
            for start in range(0, len(short), TOGETHER):
                part = short[start : start + TOGETHER]
                self.send(identity, part if len(part) == 1 else [SEVERAL, *part])
            for frames in replies:
                if len(frames) > 1:
                    self.send(identity, frames)

    def overdue(self, before: float) -> list[tuple[Session, int]]:
        """Give up the replies to learner ranks that have been held since before `before`, and return them as (session,
        request). Replies to workers stay: no collective waits for a worker."""
        if not self._held or self._held[0].since >= before:  # Fast path: called after every turn of the loop.
            return []
        given_up = [held for held in self._held if held.since < before and held.session.role == "learner"]
        for held in given_up:
            self._held.remove(held)
            held.session.waiting.discard(held.request)
        return [(held.session, held.request) for held in given_up]

    def send(self, identity: bytes, frames: Sequence[Frame]) -> None:
        """Send at once. A reply that cannot be delivered is lost; the answer to the peer's next heartbeat tells it to
        repeat the request."""
        try:
            self._way_out.send(identity, frames)
        except (zmq.Again, zmq.ZMQError) as error:
            # The peer is gone (EHOSTUNREACH) or not reading (EAGAIN).
            log.debug("a reply to %s could not be delivered: %s", identity.hex(), error)


class Replies:
    """Sends answers and errors to peers.

    Args:
        boot: identifies the memory of the run, see `ReplayServer`.
    """

    def __init__(self, outbox: Outbox, run_id: str, boot: str) -> None:
        self.outbox, self._run_id, self._boot = outbox, run_id, boot

    def send(self, identity: bytes, kind: str, request: int, body: object) -> None:
        """Send at once an answer that does not depend on the journal."""
        self.outbox.send(identity, [self.envelope(kind, request, body)])

    def turn_away(self, identity: bytes, kind: str, request: int, body: str) -> None:
        """Reply to a peer that has not been admitted: the envelope names neither the run nor the boot."""
        self.outbox.send(identity, [envelope_of("", kind, request, "", body)])

    def promise(self, session: Session, request: int, body: object) -> None:
        self.outbox.promise(session, request, [self.envelope("ok", request, body)])

    def answer(self, session: Session, request: int, verb: str, answer: Answer) -> None:
        frames: list[Frame] = [self.envelope("ok", request, answer.body), *answer.frames]
        if verb in ONCE:
            session.replies[request] = frames
            if len(session.replies) > MAX_REPLIES:
                del session.replies[next(iter(session.replies))]
        self.outbox.promise(session, request, frames)

    def again(self, session: Session, request: int) -> None:
        """Send the kept answer to a repeated request."""
        self.outbox.promise(session, request, session.replies[request])

    def error(self, session: Session, request: int, error: AsyncRLError) -> None:
        kind = next((name for kind, name in ERROR_KINDS if isinstance(error, kind)), None)
        if kind is None:
            raise error  # LedgerError: a bug in the server, and going on would train on a broken ledger.
        frames = [self.envelope(kind, request, str(error))]
        if isinstance(error, NoProgress):
            self.outbox.send(session.identity, frames)  # It depends on nothing.
        else:
            self.outbox.promise(session, request, frames)

    def envelope(self, kind: str, request: int, body: object) -> bytes:
        return envelope_of(self._run_id, kind, request, self._boot, body)


def envelope_of(run: str, kind: str, request: int, boot: str, body: object) -> bytes:
    return wire.encode_envelope(Envelope(run=run, verb=kind, request=request, incarnation=boot, body=body))
