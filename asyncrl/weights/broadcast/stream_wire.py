"""The communicator between processes through sockets, from and into host memory: a chain.

    rank 0 --> rank 1 --> rank 2 ...    each member passes on what it receives: no connection carries a byte twice
           <--        <--               while the group forms: how many behind this one have joined
           --> rank 3 --> ...           a member that cannot connect to the one before it begins a chain of its own

A neighbour's death ends a connection at once, and that member then leaves too; a silence ends at the deadline of the
group. Two processes of one machine use a Unix socket, which costs the processor less than TCP.

entrance/R    where the member behind R connects
detour/R      why R does not connect to R-1, which is the last one of its chain then, but to rank 0
"""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.weights.broadcast.forming import LOOK_S, ApartError, Forming
from asyncrl.weights.broadcast.protocol import fetch, post
from asyncrl.weights.broadcast.silence import end_when_silent
from asyncrl.weights.ipc import machine

log = logging.getLogger(__name__)

_PIECE_OUT, _PIECE_IN = 4 << 20, 1 << 20
"""Bytes per piece. Of those sent, few, as the copy that is followed is interrupted for each; of those received, short
ones, which are still in the cache of the core that hashes them next. Both ends divide the same stream."""
_ON_THE_WAY = 4 << 20
"""Bytes that a Unix socket may hold, if the system allows it: with the usual 200 kB the ends wait for each other."""
_STRANGER_S = 2.0
"""Seconds that whoever connects has to say the word."""
_CONNECT_S = 10.0
"""Seconds that a connection may take, enough for three lost packets; at most a quarter of what is left, so that there
is time for another way, and for the others to hear of it. A firewall that discards packets looks the same as a long
way."""
_AVOIDED_S = 600.0
"""Seconds for which a host is not tried again that did not answer: all others wait for each try."""
_COUNT = struct.Struct("<I")
"""Number of members that have joined: of one behind another, with those behind it."""


class StreamWire:
    """Implements `wires.Wire` without a thread: a send returns once the system has the bytes, and the system receives
    while a member does something else.

    Args:
        listen: address of this machine at which the next member connects.
        forming: of the epoch. A member without a connection does not come to the groups of other senders either.
        seat: number of this member that all know, in `ApartError`.
        avoided: hosts of other members that did not answer, and until when (monotonic) they are not tried again; this
            adds to it.

    Raises:
        ApartError: a member, this one or another, can connect neither to the one before it nor to rank 0.
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
        forming: Forming,
        seat: int = 0,
        avoided: MutableMapping[str, float] | None = None,
    ) -> None:
        self.piece_bytes = _PIECE_IN if rank else _PIECE_OUT
        self._store, self._rank, self._world, self._seat = store, rank, world, seat
        self._forming, self._avoided = forming, {} if avoided is None else avoided
        self._deadline = time.monotonic() + timeout_s
        self._before: socket.socket | None = None
        self._next: list[socket.socket] = []
        """Of rank 0, the first of each chain; of another, the one behind it, if any."""
        try:
            with ExitStack() as kept:
                entrance = _Entrance(listen, kept) if rank + 1 < world else None
                if entrance is not None:
                    post(store, f"entrance/{rank}", entrance.where)
                if rank > 0:
                    self._before = self._find_before()
                joined = self._gather(entrance) if entrance is not None else 0
            if rank == 0 and len(self._next) > 1:
                self._report_chains()
            for end in (self._before, *self._next):
                if end is not None and end.family != socket.AF_UNIX:
                    end_when_silent(end, timeout_s)
            if self._before is not None:
                _send(self._before, memoryview(_COUNT.pack(joined + 1)), self._deadline)
        except (OSError, RuntimeError) as error:
            self.abort()
            if isinstance(error, ApartError):
                raise
            forming.look()  # the cause, if others have left because of it
            raise RuntimeError(f"rank {rank} of {world} did not find its neighbours: {error}") from error

    def _find_before(self) -> socket.socket:
        """Return a connection to the member before this one, or to rank 0."""
        why = ""
        try:
            return self._connect(self._rank - 1)
        except OSError as error:
            why = str(error)
            self._forming.look()  # the one before may have left because of another, which is not this one's fault
        if self._rank > 1:
            log.warning("weights: no connection to another worker (%s): from the learner instead", why)
            post(self._store, f"detour/{self._rank}", why)
            try:
                return self._connect(0)
            except OSError as error:
                why = f"{why}, nor to the learner, at {error}"
        why = _why_apart(why)
        self._forming.give_up(why, self._seat)
        raise ApartError(self._seat, why)

    def _connect(self, rank: int) -> socket.socket:
        """Raises OSError with the address: there is no connection."""
        self._forming.wait_key(self._store, f"entrance/{rank}", self._deadline, f"rank {rank}")
        host, port, there, name, word = fetch(self._store, f"entrance/{rank}")
        end = _connect_near(name) if there == machine() else None
        if end is None:
            if rank and time.monotonic() < self._avoided.get(host, 0.0):
                raise OSError(f"{host}: it did not answer before")
            try:
                within_s = min(max(self._deadline - time.monotonic(), 0.004) / 4, _CONNECT_S)
                end = socket.create_connection((host, port), within_s)
            except OSError as error:
                if rank and not isinstance(error, ConnectionRefusedError):  # without rank 0 there is no other way
                    self._avoided[host] = time.monotonic() + _AVOIDED_S
                raise OSError(f"{host}:{port} ({error})") from error
            end.settimeout(None)
        _send(end, memoryview(word.encode()), self._deadline)
        return end

    def _gather(self, entrance: _Entrance) -> int:
        """Let those behind this member connect; return how many have joined, when all have."""
        joined = 0
        silent: list[socket.socket] = []
        """Connections of those of whom it is not known yet how many are behind them."""
        while joined < (1 if self._rank else self._world - 1):
            if self._rank and not silent and self._store.check([f"detour/{self._rank + 1}"]):
                return 0
            for end in self._ready([*entrance.doors, *silent]):
                if end in silent:
                    silent.remove(end)
                    count = bytearray(_COUNT.size)
                    _receive(end, memoryview(count), self._deadline)
                    joined += _COUNT.unpack(count)[0]
                elif (came := entrance.let_in(end, self._deadline)) is not None:
                    self._next.append(came)
                    silent.append(came)
        return joined

    def _report_chains(self) -> None:
        detours = [rank for rank in range(2, self._world) if self._store.check([f"detour/{rank}"])]
        log.warning(
            "weights: %d of %d subscribers have no connection to another one and get the weights from the learner: the "
            "first at %s",
            len(detours), self._world - 1, fetch(self._store, f"detour/{detours[0]}"),
        )  # fmt: skip

    def _ready(self, ends: Sequence[socket.socket]) -> Sequence[socket.socket]:
        """Wait until something can be read from some of `ends`, or for `LOOK_S`.

        Raises:
            RuntimeError: not by the deadline; the member before, which says nothing until all have joined, has left;
                the epoch does not form.
        """
        with selectors.DefaultSelector() as selector:  # select() itself refuses descriptors from 1024 on
            for end in (*ends, *([self._before] if self._before is not None else [])):
                selector.register(end, selectors.EVENT_READ)
            wait_s = min(max(self._deadline - time.monotonic(), 0.0), LOOK_S)
            there = [key.fileobj for key, _ in selector.select(wait_s)]
        if not there:
            self._forming.look()
            if time.monotonic() >= self._deadline:
                raise RuntimeError("the next one did not come in time")
        if self._before in there:
            raise RuntimeError("the one before has left")
        return [end for end in ends if end in there]

    def broadcast(self, buffer: torch.Tensor, left_s: float) -> Any:
        memory = buffer.numpy().data
        if self._before is None:
            self._pass_on(memory, time.monotonic() + left_s)
        return memory

    def wait(self, work: Any, left_s: float) -> None:
        if self._before is None:
            return
        deadline = time.monotonic() + left_s
        _receive(self._before, work, deadline)
        self._pass_on(work, deadline)

    def _pass_on(self, memory: memoryview, deadline: float) -> None:
        for end in self._next:
            _send(end, memory, deadline)

    def abort(self) -> None:
        for end in (self._before, *self._next):
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

    @property
    def doors(self) -> tuple[socket.socket, ...]:
        return self._near, self._far

    def let_in(self, door: socket.socket, deadline: float) -> socket.socket | None:
        """Return the connection of whoever is at the door; None if it does not say the word."""
        end, _ = door.accept()
        if door is self._near:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ON_THE_WAY)
        said = bytearray(len(self._word))
        with suppress(RuntimeError):
            _receive(end, memoryview(said), min(deadline, time.monotonic() + _STRANGER_S))
            if hmac.compare_digest(said, self._word.encode()):
                return end
        end.close()
        return None


def _why_apart(where: str) -> str:
    return (
        f"no connection to the member before it, at {where}. Over sockets the machines of workers connect to each "
        "other or to the learner's, at any port: weights.interface (or weights.host) must lead to an address that the "
        "others reach, and firewalls must let it through. Otherwise use weights=files with weights.url"
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
