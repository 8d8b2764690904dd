"""The communicator between processes through sockets, from and into host memory: a chain.

    rank 0 --> rank 1 --> rank 2 ...    each member passes on what it receives: no connection carries a byte twice
           <--        <--               while the group forms: all behind this one have joined

A neighbour's death ends a connection at once, and that member then leaves too; a silence ends at the deadline of the
group. Two processes of one machine use a Unix socket, which costs the processor less than TCP.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from asyncrl.weights.broadcast.protocol import fetch, post, wait_key
from asyncrl.weights.broadcast.silence import end_when_silent
from asyncrl.weights.ipc import machine

_PIECE_OUT, _PIECE_IN = 4 << 20, 1 << 20
"""Bytes per piece. Of those sent, few, as the copy that is followed is interrupted for each; of those received, short
ones, which are still in the cache of the core that hashes them next. Both ends divide the same stream."""
_ON_THE_WAY = 4 << 20
"""Bytes that a Unix socket may hold, if the system allows it: with the usual 200 kB the ends wait for each other."""
_STRANGER_S = 2.0
"""Seconds that whoever connects has to say the word."""
_CONNECT_S = 10.0
"""Seconds that a connection may take, enough for three lost packets; at most half of what is left, so that the others
hear of it. A firewall that discards packets looks the same as a long way."""
_LOOK_S = 0.5
"""Seconds between two looks whether another member has no connection, while this one waits for the next one's."""
_APART = "apart"
"""Key of the store with the first member that has no connection to the one before it: its seat, and why."""
_JOINED = b"+"


class ApartError(RuntimeError):
    """A member cannot connect to the one before it, and will fail to again."""

    def __init__(self, seat: int, why: str) -> None:
        super().__init__(why)
        self.seat = seat


class StreamWire:
    """Implements `wires.Wire` without a thread: a send returns once the system has the bytes, and the system receives
    while a member does something else.

    Args:
        listen: address of this machine at which the next member connects.
        seat: number of this member that all know, in `ApartError`.
        epoch: the store of all groups of this epoch, in which a member says that it has no connection: it does not
            come to the groups of other senders either.

    Raises:
        ApartError: a member, this one or another, cannot connect to the one before it.
        RuntimeError: the others did not arrive in time.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        timeout_s: float,
        listen: str,
        *,
        seat: int = 0,
        epoch: dist.Store | None = None,
    ) -> None:
        epoch = epoch or store
        self.piece_bytes = _PIECE_IN if rank else _PIECE_OUT
        self._before: socket.socket | None = None
        self._next: socket.socket | None = None
        deadline = time.monotonic() + timeout_s
        try:
            with ExitStack() as kept:
                entrance = _Entrance(listen, kept) if rank + 1 < world else None
                if entrance is not None:
                    post(store, f"entrance/{rank}", entrance.where)
                if rank > 0:
                    if not wait_key(store, f"entrance/{rank - 1}", timeout_s):
                        raise RuntimeError(f"waited {timeout_s:g} s for rank {rank - 1}")
                    self._before = _connect(epoch, seat, fetch(store, f"entrance/{rank - 1}"), deadline)
                if entrance is not None:
                    self._next = entrance.next_member(epoch, self._before, deadline)
                    _ready(epoch, [self._next], self._before, deadline)
                    _receive(self._next, memoryview(bytearray(_JOINED)), deadline)
            for end in (self._before, self._next):
                if end is not None and end.family != socket.AF_UNIX:
                    end_when_silent(end, timeout_s)
            if self._before is not None:
                _send(self._before, memoryview(_JOINED), deadline)
        except ApartError:
            self.abort()
            raise
        except (OSError, RuntimeError) as error:
            self.abort()
            _look(epoch)  # the cause, if others have left because of it
            raise RuntimeError(f"rank {rank} of {world} did not find its neighbours: {error}") from error

    def broadcast(self, buffer: torch.Tensor, left_s: float) -> Any:
        memory = buffer.numpy().data
        if self._before is None and self._next is not None:
            _send(self._next, memory, time.monotonic() + left_s)
        return memory

    def wait(self, work: Any, left_s: float) -> None:
        if self._before is None:
            return
        deadline = time.monotonic() + left_s
        _receive(self._before, work, deadline)
        if self._next is not None:
            _send(self._next, work, deadline)

    def abort(self) -> None:
        for end in (self._before, self._next):
            if end is not None:
                with suppress(OSError):  # it has ended already
                    end.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
                end.close()


class _Entrance:
    """Where the next member of the chain connects, over the network or from this machine; closed with `kept`."""

    def __init__(self, listen: str, kept: ExitStack) -> None:
        (family, *_), *_ = socket.getaddrinfo(listen, 0, type=socket.SOCK_STREAM)
        self._word, name = secrets.token_hex(16), f"\0asyncrl-{secrets.token_hex(8)}"  # no file: ends with its process
        self._near = kept.enter_context(socket.socket(socket.AF_UNIX))
        self._near.bind(name)
        self._near.listen()
        self._far = kept.enter_context(socket.create_server((listen, 0), family=family))
        self.where = [listen, self._far.getsockname()[1], machine(), name, self._word]

    def next_member(self, epoch: dist.Store, before: socket.socket | None, deadline: float) -> socket.socket:
        """Return the connection of whoever says the word. Raises RuntimeError: nobody has by `deadline`."""
        while True:
            for door in _ready(epoch, [self._near, self._far], before, deadline):
                end, _ = door.accept()
                if door is self._near:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ON_THE_WAY)
                said = bytearray(len(self._word))
                with suppress(RuntimeError):
                    _receive(end, memoryview(said), min(deadline, time.monotonic() + _STRANGER_S))
                    if hmac.compare_digest(said, self._word.encode()):
                        return end
                end.close()


def _ready(
    epoch: dist.Store, ends: Sequence[socket.socket], before: socket.socket | None, deadline: float
) -> Sequence[socket.socket]:
    """Wait until something can be read from one of `ends`. Raises RuntimeError: not by `deadline`, or the member
    `before`, which says nothing until all have joined, has left; ApartError."""
    with selectors.DefaultSelector() as selector:  # select() itself refuses descriptors from 1024 on
        for end in (*ends, *([before] if before is not None else [])):
            selector.register(end, selectors.EVENT_READ)
        while not (ready := selector.select(min(max(deadline - time.monotonic(), 0.0), _LOOK_S))):
            _look(epoch)
            if time.monotonic() >= deadline:
                raise RuntimeError("the next one did not come in time")
    there = [key.fileobj for key, _ in ready]
    if before in there:
        raise RuntimeError("the one before has left")
    return [end for end in ends if end in there]


def _look(epoch: dist.Store) -> None:
    """Raises ApartError: some member has no connection."""
    if epoch.check([_APART]):
        raise ApartError(*fetch(epoch, _APART))


def _connect(epoch: dist.Store, seat: int, where: Sequence[Any], deadline: float) -> socket.socket:
    host, port, there, name, word = where
    end = _connect_near(name) if there == machine() else None
    if end is None:
        try:
            within_s = min(max(deadline - time.monotonic(), 0.002) / 2, _CONNECT_S)
            end = socket.create_connection((host, port), within_s)
        except OSError as error:
            _look(epoch)  # the one before may have left because of another, which is not this one's fault
            apart = ApartError(seat, _why_apart(host, port, error))
            epoch.compare_set(_APART, "", msgpack.packb([seat, str(apart)]))  # pyright: ignore[reportArgumentType]
            _look(epoch)  # the first counts
            raise apart from error
        end.settimeout(None)
    _send(end, memoryview(word.encode()), deadline)
    return end


def _why_apart(host: str, port: int, error: OSError) -> str:
    return (
        f"no connection to the member before it, at {host}:{port} ({error}). Over sockets the machines of learner and "
        "workers connect to each other, at any port: weights.interface (or weights.host) must lead to an address that "
        "the others reach, and firewalls must let it through. Otherwise use weights=pull"
    )


def _connect_near(name: str) -> socket.socket | None:
    """None if that process is on this machine but not in this network namespace."""
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(name)
    except OSError:
        end.close()
        return None
    return end


def _send(end: socket.socket, memory: memoryview, deadline: float) -> None:
    """Raises RuntimeError: the other end is gone, or has not taken everything by `deadline`."""
    while memory:
        with _until(deadline, end, socket.SO_SNDTIMEO):
            memory = memory[end.send(memory) :]


def _receive(end: socket.socket, memory: memoryview, deadline: float) -> None:
    """Fill `memory`. Raises RuntimeError: the other end is gone, or has not sent everything by `deadline`."""
    while memory:
        with _until(deadline, end, socket.SO_RCVTIMEO):
            came = end.recv_into(memory, len(memory), socket.MSG_WAITALL)
            if not came:
                raise ConnectionResetError("it has closed the connection")
            memory = memory[came:]


@contextmanager
def _until(deadline: float, end: socket.socket, option: int) -> Iterator[None]:
    """Bound one call by the system's own timeout: with Python's, a call would return after every few bytes, and ask for
    the interpreter lock again."""
    left = deadline - time.monotonic()
    if left <= 0.0:
        raise RuntimeError("a member is silent or too slow")
    try:
        end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(left), int(left % 1.0 * 1e6) or 1))
        yield
    except BlockingIOError:
        return  # nothing came, or went, by then
    except OSError as error:
        raise RuntimeError(f"another member has left: {error}") from error
