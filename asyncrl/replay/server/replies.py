"""Encode the server's replies in envelopes of its run, and keep answers until the peer has acknowledged them."""

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
"""Limit on answers kept for one peer. A repeated request whose answer was discarded is run again, which changes
nothing."""


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
        if verb in SETTLED:
            self.outbox.send(session.identity, frames)
        else:
            self.outbox.promise(session, request, frames)

    def again(self, session: Session, request: int) -> None:
        """Send the kept answer to a repeated request."""
        self.outbox.promise(session, request, session.replies[request])

    def error(self, session: Session, request: int, error: AsyncRLError) -> None:
        kind = next((name for kind, name in ERROR_KINDS.items() if isinstance(error, kind)), None)
        if kind is None:
            raise error  # LedgerError: a bug in the server, and going on would train on a broken ledger.
        frames = [self.envelope(kind, request, str(error))]
        if isinstance(error, NoProgress):
            self.outbox.send(session.identity, frames)  # It must not wait for a full disk, and depends on nothing.
        else:
            self.outbox.promise(session, request, frames)

    def envelope(self, kind: str, request: int, body: object) -> bytes:
        return envelope_of(self._run_id, kind, request, self._boot, body)


def envelope_of(run: str, kind: str, request: int, boot: str, body: object) -> bytes:
    return wire.encode_envelope(Envelope(run=run, verb=kind, request=request, incarnation=boot, body=body))
