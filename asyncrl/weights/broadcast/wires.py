"""The communicators under a `WeightGroup`: sockets, nccl and shared memory behind one interface, with bounded
waits.

Any nccl call may hang: while a communicator forms (a dead member has not connected), or while an operation is queued,
queried or aborted. So each communicator has one thread that makes all its calls in the order of the requests, and a
requester waits for that thread until its deadline. A thread that hangs then is abandoned with its communicator, and the
epoch is over: another member of the group cannot block this process.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from asyncrl.checks.addresses import (
    OF_THE_RANKS,
    address_of,
    interface_of,
    interfaces_here,
    is_loopback,
    own_address,
    unknown_interfaces,
)
from asyncrl.errors import ConfigError
from asyncrl.settings.weights import ON_DEVICE
from asyncrl.weights.broadcast.forming import LOOK_S, Forming
from asyncrl.weights.broadcast.local_wire import LocalWire
from asyncrl.weights.broadcast.stream_wire import StreamWire
from asyncrl.weights.streams import on, stream_of

log = logging.getLogger(__name__)
Done = TypeVar("Done")

_ABORT_S = 10.0
"""Seconds that an abort may take. Only a hanging driver needs more, and it is not waited for."""
_MARGIN_S = 1.0
"""Seconds beyond the deadline that a thread checks itself, after which the thread is considered stuck."""
_CHANNELS = 4
"""Limit on the GPU blocks that a broadcast of weights occupies, so that kernels of other communicators find room."""
_CONSTRUCTION = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How a process joins the groups of all epochs."""

    host: str
    """Host of the publisher's store, which binds it."""
    timeout_s: float
    """Timeout in seconds of the store, the groups and the acknowledgements."""
    backend: str = "sockets"
    """`sockets`, `nccl` or `ipc`; subscribers learn it from the board."""
    interface: str = ""
    """`weights.interface` of this end: the name of a network interface; empty lets the backend find one."""
    device: torch.device | None = None
    """GPU of this process, with its index."""
    seat: int = 0
    """Of a subscriber: its rank among all, whichever groups it is in."""
    avoided: dict[str, float] = field(default_factory=dict)
    """Of a subscriber over sockets: see `StreamWire`."""

    @property
    def place(self) -> torch.device | str:
        """Device that the backend sends from, and receives into."""
        return self.device if self.device is not None and self.backend in ON_DEVICE else "cpu"


class Wire(Protocol):
    """One communicator, formed. `broadcast` and `wait` raise RuntimeError if a member is gone, silent or too slow."""

    piece_bytes: int
    """Largest piece that it is given, in bytes."""

    def broadcast(self, buffer: torch.Tensor, left_s: float) -> Any:
        """Start to send (rank 0) or to receive into `buffer`."""
        ...

    def wait(self, work: Any, left_s: float) -> None:
        """Wait at most `left_s` until `work` of a `broadcast` is done."""
        ...

    def abort(self) -> None:
        """Leave; a member that still waits gets an error. Never raises, and takes seconds at most."""
        ...


def open_wire(store: dist.Store, forming: Forming, link: Link, rank: int, world: int) -> Wire:
    """Join the other members of a group.

    Args:
        store: of this group alone.
        forming: of all groups of this epoch.

    Raises:
        RuntimeError: not all arrived within `timeout_s`, or one died meanwhile.
    """
    if link.backend == "ipc":
        return LocalWire(store, rank, world, link.timeout_s, forming)
    if link.backend == "sockets":
        listen = address_to_listen(link.interface, link.host, os.environ)
        return StreamWire(
            store, rank, world, link.timeout_s, listen, forming=forming, seat=link.seat, avoided=link.avoided
        )
    # A connection of its own: while one waits in the store for others, nothing else gets through it.
    apart: dist.Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
    wire = NcclWire(apart, link, rank, world, forming)
    try:
        _all_formed(store, rank, world, time.monotonic() + link.timeout_s, forming)
    except RuntimeError:
        wire.abort()
        raise
    return wire


def _all_formed(store: dist.Store, rank: int, world: int, deadline: float, forming: Forming) -> None:
    """Let rank 0 wait for all others: its own connections are there before those between them are, if they ever are.

    Raises:
        RuntimeError: not by `deadline`, or one of them failed.
    """
    if rank:
        store.add("formed", 1)
        return
    pause_s = 0.001
    while (there := store.add("formed", 0)) < world - 1:
        forming.look()
        if time.monotonic() >= deadline:
            raise RuntimeError(f"{world - 1 - there} of {world - 1} subscribers have no connection to each other")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.1)


def address_to_listen(interface: str, host: str, environment: Mapping[str, str]) -> str:
    """Return the address of the named interface, otherwise of the one that leads to `host`.

    GLOO_SOCKET_IFNAME is ignored where it cannot be meant: with a publisher on loopback it would expose traffic that
    stays on this machine to the network; and the value set for the learner's own ranks is not the user's choice.

    Raises:
        ConfigError: there is no such interface, or it has no address.
    """
    towards = own_address(host)
    named = environment.get("GLOO_SOCKET_IFNAME", "")
    if named in ("lo", environment.get(OF_THE_RANKS)) or is_loopback(towards):
        named = ""
    name = (interface or named).partition(",")[0]
    if not name:
        return towards
    if unknown_interfaces(name):
        raise ConfigError(
            f"weights.interface (or GLOO_SOCKET_IFNAME) names {name}, which is not a network interface of "
            f"{socket.gethostname()}. It has {interfaces_here()}. Name one of those, or leave it empty"
        )
    # Its IPv4 address would not be reached by a member that has found this network by an IPv6 address.
    if ":" in towards and interface_of(towards) == name:
        return towards
    if not (address := address_of(name)):
        raise ConfigError(
            f"weights.interface (or GLOO_SOCKET_IFNAME) names {name}, which has no IPv4 address on "
            f"{socket.gethostname()}: weights cannot go that way. Name the interface that leads to {host}, or leave it "
            "empty"
        )
    return address


class NcclWire:
    """nccl communicator without torch's watchdog, which ends a process whose collective fails: here that means a dead
    member."""

    piece_bytes = 1 << 62  # nccl divides buffers itself

    def __init__(self, store: dist.Store, link: Link, rank: int, world: int, forming: Forming) -> None:
        if link.device is None or link.device.index is None:
            raise RuntimeError(f"nccl needs the number of its GPU, but was given {link.device}")
        self._group: Any = None
        self._left = False
        self._calls = Calls("nccl")
        try:
            self._calls.ask(lambda: self._form(store, link, rank, world), link.timeout_s, "to form", forming.look)
        except RuntimeError:
            self.abort()
            raise

    def broadcast(self, buffer: torch.Tensor, left_s: float) -> Any:
        options, stream = broadcast_options(left_s), stream_of(buffer)
        return self._calls.ask(lambda: self._queue(buffer, options, stream), left_s, "to take a broadcast")

    def wait(self, work: Any, left_s: float) -> None:
        deadline = time.monotonic() + left_s
        self._calls.ask(lambda: _completed(work, deadline), left_s + _MARGIN_S, "to finish a broadcast")

    def abort(self) -> None:
        self._left = True
        group, self._group = self._group, None
        self._calls.end()
        if group is None:
            return
        last = Calls("nccl", "weights-nccl-abort")
        try:
            last.ask(group.abort, _ABORT_S, "to abort")
        except RuntimeError as error:
            log.warning("weights: a communicator could not be closed: %s", error)
        last.end()

    def _queue(self, buffer: torch.Tensor, options: dist.BroadcastOptions, stream: torch.cuda.Stream | None) -> Any:
        """Start a broadcast after what is enqueued on `stream`, which the requester uses, and after nothing else."""
        with on(stream):
            return self._group.broadcast([buffer], options)

    def _form(self, store: dist.Store, link: Link, rank: int, world: int) -> None:
        assert link.device is not None
        if torch.cuda.is_available():
            torch.cuda.set_device(link.device)  # for this thread
        if link.interface:  # nccl reads it once per process; a value that is already set stays
            os.environ.setdefault("NCCL_SOCKET_IFNAME", link.interface)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=link.timeout_s)
        options.is_high_priority_stream = True
        options.config.max_ctas = _CHANNELS
        with _without_watchdog():
            group = dist.ProcessGroupNCCL(store, rank, world, options)
        self._group = group
        group.eager_connect_single_device(link.device)
        if self._left:  # it formed after the caller had stopped waiting
            group.abort()


class Calls:
    """A thread that makes the requested calls of a library one after another."""

    def __init__(self, library: str, thread: str = "") -> None:
        self._library = library
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=thread or f"weights-{library}", daemon=True)
        self._thread.start()

    def ask(self, call: Callable[[], Done], seconds: float, what: str, look: Callable[[], None] | None = None) -> Done:
        """Run `call` on the thread and return its result.

        Args:
            look: called every `LOOK_S` meanwhile; raises if the wait has become useless.

        Raises:
            RuntimeError: no result after `seconds`, or the call raised.
        """
        answer: Future[Done] = Future()
        self._asked.put((call, answer))
        deadline = time.monotonic() + seconds
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            try:
                return answer.result(left_s if look is None else min(left_s, LOOK_S))
            except FutureTimeout:
                if time.monotonic() >= deadline:
                    why = f"waited {seconds:.1f} s for {self._library} {what}: a member is gone or silent"
                    raise RuntimeError(why) from None
            if look is not None:
                look()

    def end(self) -> None:
        """End the thread after the calls requested so far; does not wait for it."""
        self._asked.put(None)

    def _main(self) -> None:
        while (asked := self._asked.get()) is not None:
            call, answer = asked
            try:
                answer.set_result(call())
            except Exception as error:  # thread boundary: the caller of `ask` gets it
                answer.set_exception(error if isinstance(error, RuntimeError) else RuntimeError(str(error)))


def broadcast_options(left_s: float) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = timedelta(seconds=left_s)
    return options


def _completed(work: Any, deadline: float) -> None:
    """Poll until the peers' GPUs are done, since nccl only enqueues. Raises the error of `work`."""
    while not work.is_completed():
        if time.monotonic() >= deadline:
            raise RuntimeError("a broadcast of nccl did not finish in time")
        time.sleep(0.0005)
    work.wait()


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Create communicators without a watchdog. torch has no options for this: a communicator reads them from the
    environment when it is created.

    With blocking waits torch starts neither the watchdog nor the thread that dumps and ends the process for it; the
    second variable is for versions of torch that start them all the same.
    """
    ours = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    with _CONSTRUCTION:  # otherwise two of them could restore each other's values
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
