"""What the server says, in the envelopes of its run, and which answers it keeps until the peer has them."""

from __future__ import annotations

from asyncrl.errors import AsyncRLError, NoProgress
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.wire import Envelope
from asyncrl.replay.server.handlers import ONCE, SETTLED
from asyncrl.replay.server.outbox import Outbox
from asyncrl.replay.server.served import ERROR_KINDS
from asyncrl.replay.server.sessions import Answer, Session

MAX_REPLIES = 1024
"""Answers remembered for one peer. Without the oldest, a request asked again is run again, which changes nothing."""


class Replies:
    """`boot` names the memory of the run, see `ReplayServer`."""

    def __init__(self, outbox: Outbox, run_id: str, boot: str) -> None:
        self.outbox, self._run_id, self._boot = outbox, run_id, boot

    def send(self, identity: bytes, kind: str, request: int, body: object) -> None:
        """An answer that rests on nothing durable."""
        self.outbox.send(identity, [self.envelope(kind, request, body)])

    def turn_away(self, identity: bytes, kind: str, request: int, body: str) -> None:
        """To somebody who has not been let in: it learns neither the run nor the boot."""
        self.outbox.send(identity, [envelope_of("", kind, request, "", body)])

    def promise(self, session: Session, request: int, body: object) -> None:
        self.outbox.promise(session, request, [self.envelope("ok", request, body)])

    def answer(self, session: Session, request: int, verb: str, answer: Answer) -> None:
        frames: list[Frame] = [self.envelope("ok", request, answer.body), *answer.frames]
        if verb in ONCE:
            session.replies[request] = frames
            if len(session.replies) > MAX_REPLIES:
                del session.replies[next(iter(session.replies))]
        if verb in SETTLED:
            self.outbox.send(session.identity, frames)
        else:
            self.outbox.promise(session, request, frames)

    def again(self, session: Session, request: int) -> None:
        """The answer that is kept."""
        self.outbox.promise(session, request, session.replies[request])

    def error(self, session: Session, request: int, error: AsyncRLError) -> None:
        kind = next((name for kind, name in ERROR_KINDS.items() if isinstance(error, kind)), None)
        if kind is None:
            raise error  # LedgerError: a bug here, and going on would train on a broken ledger.
        frames = [self.envelope(kind, request, str(error))]
        if isinstance(error, NoProgress):
            self.outbox.send(session.identity, frames)  # It promises nothing, and must not wait for a full disk.
        else:
            self.outbox.promise(session, request, frames)

    def envelope(self, kind: str, request: int, body: object) -> bytes:
        return envelope_of(self._run_id, kind, request, self._boot, body)


def envelope_of(run: str, kind: str, request: int, boot: str, body: object) -> bytes:
    return wire.encode_envelope(Envelope(run=run, verb=kind, request=request, incarnation=boot, body=body))
