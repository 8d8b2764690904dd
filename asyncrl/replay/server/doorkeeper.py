"""Decide which connections the server reads from, so that a malicious one costs the others little.

Each connection speaks for one peer. A connection that sends too many malformed messages, or fills the server's queue by
itself, is closed. An honest peer behind it reconnects, and is read again once its count has decayed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterable
from typing import TypeVar

import zmq

log = logging.getLogger(__name__)

MAX_MALFORMED = 64
"""Malformed messages from one connection, or from one peer, after which it is no longer read."""
MAX_STRANGE = 4096
"""Limit on requests from a connection whose peer has not said hello. Honest peers send a few after a short
disconnection."""
STRANGER_BYTES = 64 << 10
"""Limit in bytes on the header frame of a connection that has not said hello. Decoding 8 MB takes the server a tenth of
a second."""
FLOOD = 20_000
"""Limit on the count of one connection while the server's queue is never empty, after subtracting what has decayed. A
message without payload counts `BARE`, so 4,000 of these. An honest peer waits for answers and has far fewer requests in
flight."""
FORGIVEN_PER_S = 2000.0
"""Decay of the count per second. The queue of a busy server may not be empty for hours; honest peers send less than
this."""
BARE = 5
"""Count of one message without payload: honest peers send few of them."""
REMEMBERED = 4096
"""Limit on the entries of each table. The oldest are forgotten first and start again from zero."""

Key = TypeVar("Key", bytes, str)


def _remember(memory: dict[Key, int], key: Key, value: int) -> None:
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > REMEMBERED:
        del memory[next(iter(memory))]


class Doorkeeper:
    """Counts per connection (by ROUTER identity) and per peer (by incarnation)."""

    def __init__(self) -> None:
        self._wrong: dict[bytes, int] = {}
        """Connection -> number of malformed messages."""
        self._strange: dict[bytes, int] = {}
        """Connection -> number of requests from unknown peers."""
        self._closed: dict[bytes, int] = {}
        self._expelled: dict[str, int] = {}
        self._seats: dict[bytes, str] = {}
        """Connection -> incarnation of the live peer it speaks for."""
        self._queued: dict[bytes | str, float] = {}
        """Peer (or connection, if its peer is unknown) -> message count since the queue was last empty. A new
        connection of a known peer keeps the count: what the old ones have sent is still in the queue."""

    def may_speak(self, connection: bytes, frames: int) -> bool:
        """Whether to read a message with this many frames. Counts it."""
        count = self._count(connection, frames > 1)
        return count <= FLOOD and self._wrong.get(connection, 0) < MAX_MALFORMED

    def came_too(self, connection: bytes, payloads: Iterable[int]) -> None:
        """Count the further requests in a message that was read, each like a message of its own.

        Args:
            payloads: number of payload frames of each request.
        """
        for frames in payloads:
            self._count(connection, frames > 0)

    def _count(self, connection: bytes, has_payload: bool) -> float:
        """Count one message and return the new count of its speaker."""
        speaker = self._seats.get(connection, connection)
        before = self._queued.get(speaker, 0)
        count = self._queued[speaker] = before + (1 if has_payload else BARE)
        if before <= FLOOD < count:
            log.warning("a connection (%s) sends more than is accepted and is closed", self.speaks_for(connection))
        return count

    def must_close(self, connection: bytes) -> bool:
        """Return true once for each connection that is no longer read. What it has already sent must still be
        discarded."""
        if connection in self._closed:
            return False
        _remember(self._closed, connection, 1)
        return True

    def queue_is_empty(self) -> None:
        if self._queued:
            self._queued.clear()

    def forgive(self, seconds: float) -> None:
        """Reduce all counts by the decay of this many seconds."""
        less = FORGIVEN_PER_S * seconds
        self._queued = {speaker: count - less for speaker, count in self._queued.items() if count > less}

    def speaks_for(self, connection: bytes) -> str:
        """The incarnation of the live peer that this connection speaks for; empty if there is none."""
        return self._seats.get(connection, "")

    def seat(self, connection: bytes, incarnation: str, before: bytes) -> None:
        """Record that a peer has moved from connection `before` to `connection`."""
        if before != connection:
            self._seats.pop(before, None)
        self._seats[connection] = incarnation

    def leave(self, connection: bytes) -> None:
        self._seats.pop(connection, None)

    def malformed(self, connection: bytes) -> int:
        """Count a malformed message; return how many have come from this connection, including this one."""
        count = self._wrong.get(connection, 0) + 1
        _remember(self._wrong, connection, count)
        return count

    def strange(self, connection: bytes, nbytes: int) -> None:
        """Count a request from an unknown peer. A large one counts as many."""
        count = self._strange.get(connection, 0) + 1 + MAX_STRANGE * nbytes // (64 << 20)
        _remember(self._strange, connection, count)
        if count > MAX_STRANGE:
            _remember(self._wrong, connection, MAX_MALFORMED)

    def expel(self, connection: bytes, incarnation: str) -> None:
        _remember(self._wrong, connection, MAX_MALFORMED)
        _remember(self._expelled, incarnation, 1)
        self.leave(connection)

    def is_expelled(self, incarnation: str) -> bool:
        return incarnation in self._expelled


def hang_up(message: zmq.Frame) -> None:
    """Close the connection that a message came from. libzmq has no call for this and would go on reading. If the
    connection is already closed, its file descriptor may belong to another connection by now; that peer reconnects."""
    with contextlib.suppress(OSError, zmq.ZMQError):  # closed already
        number = message.get(zmq.SRCFD)
        if isinstance(number, int) and number >= 0:
            double = os.dup(number)
            try:
                line = socket.socket(fileno=double)
            except OSError:  # by now the descriptor of a file
                os.close(double)
                raise
            with line:
                line.shutdown(socket.SHUT_RDWR)
