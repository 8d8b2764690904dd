"""Which connections are heard: what the server remembers of each, so that one that means harm costs the others little.

A connection speaks for one peer. One that sends too much that is no message, or fills the server's queue alone, is
closed; an honest peer behind it connects anew, and is heard again once its count is forgiven.
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
"""Malformed messages from one connection, or of one peer, before it is heard no more."""
MAX_STRANGE = 4096
"""Requests from a connection whose peer has not said hello: after a short break honest ones send a few of them."""
STRANGER_BYTES = 64 << 10
"""Header of a connection that has not said hello. Taking 8 MB apart takes the server a tenth of a second."""
FLOOD = 20_000
"""Messages from one connection, without the server's queue ever being empty, above those that are forgiven; one
without a payload counts `BARE`, so of these 4,000. An honest peer waits for answers and has nowhere near as many under
way."""
FORGIVEN_PER_S = 2000.0
"""Counts. A busy server's queue may not be empty for hours; honest peers send less than this."""
BARE = 5
"""As so many counts one without a payload: honest peers send few of them."""
REMEMBERED = 4096
"""Of each kind; the oldest are forgotten first, and could begin again."""

Key = TypeVar("Key", bytes, str)


def _remember(memory: dict[Key, int], key: Key, value: int) -> None:
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > REMEMBERED:
        del memory[next(iter(memory))]


class Doorkeeper:
    """Connections by their ROUTER identity, peers by their incarnation."""

    def __init__(self) -> None:
        self._wrong: dict[bytes, int] = {}
        """Connection -> malformed messages."""
        self._strange: dict[bytes, int] = {}
        """Connection -> requests of peers that are not known."""
        self._closed: dict[bytes, int] = {}
        self._expelled: dict[str, int] = {}
        self._seats: dict[bytes, str] = {}
        """Connection -> the live peer that it speaks for."""
        self._queued: dict[bytes | str, float] = {}
        """Peer, or connection of a stranger, -> messages since the queue was last empty. A new connection begins no
        new count: what the old ones have sent is still in the queue."""

    def may_speak(self, connection: bytes, frames: int) -> bool:
        """Whether a message of so many frames is read at all."""
        count = self._count(connection, frames > 1)
        return count <= FLOOD and self._wrong.get(connection, 0) < MAX_MALFORMED

    def came_too(self, connection: bytes, payloads: Iterable[int]) -> None:
        """Further requests in a message that was read, with so many frames each: they count as if each were one."""
        for frames in payloads:
            self._count(connection, frames > 0)

    def _count(self, connection: bytes, has_payload: bool) -> float:
        """What it comes to with this one."""
        speaker = self._seats.get(connection, connection)
        before = self._queued.get(speaker, 0)
        count = self._queued[speaker] = before + (1 if has_payload else BARE)
        if before <= FLOOD < count:
            log.warning("a connection (%s) sends more than is taken in: it is closed", self.speaks_for(connection))
        return count

    def must_close(self, connection: bytes) -> bool:
        """Once for each connection that is heard no more; what it has sent already is still to be thrown away."""
        if connection in self._closed:
            return False
        _remember(self._closed, connection, 1)
        return True

    def queue_is_empty(self) -> None:
        if self._queued:
            self._queued.clear()

    def forgive(self, seconds: float) -> None:
        """So much time has passed."""
        less = FORGIVEN_PER_S * seconds
        self._queued = {speaker: count - less for speaker, count in self._queued.items() if count > less}

    def speaks_for(self, connection: bytes) -> str:
        """The incarnation of a live peer; empty when it has none."""
        return self._seats.get(connection, "")

    def seat(self, connection: bytes, incarnation: str, before: bytes) -> None:
        """The peer is at this connection now; it was at `before`."""
        if before != connection:
            self._seats.pop(before, None)
        self._seats[connection] = incarnation

    def leave(self, connection: bytes) -> None:
        self._seats.pop(connection, None)

    def malformed(self, connection: bytes) -> int:
        """How many have come from there, this one included."""
        count = self._wrong.get(connection, 0) + 1
        _remember(self._wrong, connection, count)
        return count

    def strange(self, connection: bytes, nbytes: int) -> None:
        """A request of a peer that is not known; a large one counts as many."""
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
    """Close the connection that a message came by: libzmq has no call for it, and would go on reading. Where it is
    closed already its number may be another's by now, who then connects anew."""
    with contextlib.suppress(OSError, zmq.ZMQError):  # closed already
        number = message.get(zmq.SRCFD)
        if isinstance(number, int) and number >= 0:
            double = os.dup(number)
            try:
                line = socket.socket(fileno=double)
            except OSError:  # the number of a file by now
                os.close(double)
                raise
            with line:
                line.shutdown(socket.SHUT_RDWR)
