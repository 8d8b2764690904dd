"""The communicators under a `WeightGroup`: gloo, nccl and shared memory behind one interface, each wait bounded.

Of nccl any call may fail to come back: while a communicator forms (a member that died has not dialled), while one is
queued, queried or aborted. So one thread of each communicator makes all its calls, in the order in which they were
asked for, and who asked waits for that thread, until its deadline. A thread that is stuck then is left behind, with the
communicator, and the epoch is over: another member of the group cannot hold this process.
"""

# torch documents its stores at `torch.distributed` but does not list them in `__all__`.
# pyright: reportPrivateImportUsage=false

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
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from asyncrl.checks.addresses import (
    OF_THE_RANKS,
    interface_of,
    interfaces_here,
    is_loopback,
    own_address,
    unknown_interfaces,
)
from asyncrl.errors import ConfigError
from asyncrl.weights.broadcast.local_wire import LocalWire

log = logging.getLogger(__name__)
Done = TypeVar("Done")

_GLOO_PIECE = 4 << 20
"""Bytes that gloo sends at a time. What arrived is hashed while the next piece is on its way; shorter and longer ones
pass through the sockets more slowly."""
_ABORT_S = 10.0
"""What an abort gets. Only a driver that is stuck needs more, and nothing is waited for there."""
_MARGIN_S = 1.0
"""Beyond the deadline of what a thread looks at itself, until it is taken to be stuck."""
_CHANNELS = 4
"""Most blocks of a GPU that a broadcast of weights occupies: the kernels of other communicators find room beside it."""
_CONSTRUCTION = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank of one epoch, and where it meets the others."""

    store: dist.Store
    host: str
    """Of the publisher's store."""
    rank: int
    world: int
    timeout_s: float
    interface: str = ""
    """`weights.interface`: names of network interfaces, by commas; empty is as the backend finds one."""
    device: torch.device | None = None


class Wire(Protocol):
    """One communicator, formed. `broadcast` and `wait` raise RuntimeError when a member is gone, silent or too slow."""

    piece_bytes: int
    """What it is given at a time."""

    def broadcast(self, buffer: torch.Tensor, left_s: float) -> Any:
        """Begin to send (rank 0) or to receive into `buffer`."""
        ...

    def wait(self, work: Any, left_s: float) -> None:
        """Until `work` of a `broadcast` is done, at most so long."""
        ...

    def abort(self) -> None:
        """Leave; who still waits here gets an error. Never raises, and takes at most seconds."""
        ...


def open_wire(backend: str, place: Place) -> Wire:
    """Join the others of this epoch.

    Raises:
        RuntimeError: they did not all come within `timeout_s`, or one died on the way.
    """
    if backend == "ipc":
        return LocalWire(place.store, place.rank, place.world, place.timeout_s)
    return GlooWire(place) if backend == "gloo" else NcclWire(place)


def gloo_devices(interface: str, host: str, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Where gloo listens: on the interfaces that are named, else on that which leads to `host`, and nowhere besides.

    GLOO_SOCKET_IFNAME does not count where it cannot be meant: for a publisher on loopback it would open to the network
    what stays on this machine, and what the learner's ranks use among themselves is no user's word.
    """
    towards = own_address(host)
    named = environment.get("GLOO_SOCKET_IFNAME", "")
    if named in ("lo", environment.get(OF_THE_RANKS)) or is_loopback(towards):
        named = ""
    names = [name for name in (interface or named).split(",") if name]
    if not names:
        return [{"hostname": towards}]
    # Of an interface gloo takes the IPv4 address, by which nobody meets a member that has no name for its own.
    of_host = interface_of(towards) if ":" in towards else ""
    return [{"hostname": towards} if name == of_host else {"interface": name} for name in names]


def _gloo_device(where: Mapping[str, str]) -> Any:
    """Raises ConfigError: there is no such interface."""
    missing = unknown_interfaces(where.get("interface", ""))
    if missing:
        raise ConfigError(
            f"weights.interface (or GLOO_SOCKET_IFNAME) names {missing[0]}, which is no network interface of "
            f"{socket.gethostname()}. It has {interfaces_here()}. Name one of those, or leave it empty"
        )
    return dist.ProcessGroupGloo.create_device(**where)


class GlooWire:
    """Its own timeouts bound it."""

    piece_bytes = _GLOO_PIECE

    def __init__(self, place: Place) -> None:
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = timedelta(seconds=place.timeout_s)  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [  # pyright: ignore[reportAttributeAccessIssue]
            _gloo_device(where) for where in gloo_devices(place.interface, place.host, os.environ)
        ]
        self._group = dist.ProcessGroupGloo(place.store, place.rank, place.world, options)

    def broadcast(self, buffer: torch.Tensor, left_s: float) -> Any:
        return self._group.broadcast([buffer], broadcast_options(left_s))  # pyright: ignore[reportAttributeAccessIssue]

    def wait(self, work: Any, left_s: float) -> None:
        work.wait()

    def abort(self) -> None:
        self._group.abort()


class NcclWire:
    """Without torch's watchdog, which ends a process whose collective fails: here that is a member that died."""

    piece_bytes = 1 << 62  # it cuts for itself

    def __init__(self, place: Place) -> None:
        if place.device is None or place.device.index is None:
            raise RuntimeError(f"nccl needs the number of its GPU, and was given {place.device}")
        self._group: Any = None
        self._left = False
        self._calls = Calls("weights-nccl")
        try:
            self._calls.ask(lambda: self._form(place), place.timeout_s, "to form")
        except RuntimeError:
            self.abort()
            raise

    def broadcast(self, buffer: torch.Tensor, left_s: float) -> Any:
        options = broadcast_options(left_s)
        return self._calls.ask(lambda: self._group.broadcast([buffer], options), left_s, "to take a broadcast")

    def wait(self, work: Any, left_s: float) -> None:
        deadline = time.monotonic() + left_s
        self._calls.ask(lambda: _completed(work, deadline), left_s + _MARGIN_S, "to finish a broadcast")

    def abort(self) -> None:
        self._left = True
        group, self._group = self._group, None
        self._calls.end()
        if group is None:
            return
        last = Calls("weights-nccl-abort")
        try:
            last.ask(group.abort, _ABORT_S, "to abort")
        except RuntimeError as error:
            log.warning("weights: a communicator is left behind: %s", error)
        last.end()

    def _form(self, place: Place) -> None:
        assert place.device is not None
        if torch.cuda.is_available():
            torch.cuda.set_device(place.device)  # of this thread
        if place.interface:  # of those that nccl, which asks once per process, was not told another way
            os.environ.setdefault("NCCL_SOCKET_IFNAME", place.interface)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=place.timeout_s)
        options.is_high_priority_stream = True
        options.config.max_ctas = _CHANNELS
        with _without_watchdog():
            group = dist.ProcessGroupNCCL(place.store, place.rank, place.world, options)
        self._group = group
        group.eager_connect_single_device(place.device)
        if self._left:  # it came back after whoever waited for it had gone
            group.abort()


class Calls:
    """A thread that makes the calls it is asked for, one after the other."""

    def __init__(self, name: str) -> None:
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def ask(self, call: Callable[[], Done], seconds: float, what: str) -> Done:
        """Its result.

        Raises:
            RuntimeError: it is not there after `seconds`, or the call raised.
        """
        answer: Future[Done] = Future()
        self._asked.put((call, answer))
        try:
            return answer.result(seconds)
        except FutureTimeout:
            raise RuntimeError(f"waited {seconds:.1f} s for nccl {what}, and a member is gone or silent") from None

    def end(self) -> None:
        """After what was asked so far; nobody waits for it."""
        self._asked.put(None)

    def _main(self) -> None:
        while (asked := self._asked.get()) is not None:
            call, answer = asked
            try:
                answer.set_result(call())
            except Exception as error:  # thread boundary: whoever asked gets it
                answer.set_exception(error if isinstance(error, RuntimeError) else RuntimeError(str(error)))


def broadcast_options(left_s: float) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = timedelta(seconds=left_s)
    return options


def _completed(work: Any, deadline: float) -> None:
    """nccl only enqueues: this looks until the GPUs of the peers are done. Raises what became of `work`."""
    while not work.is_completed():
        if time.monotonic() >= deadline:
            raise RuntimeError("a broadcast of nccl was not through in time")
        time.sleep(0.0005)
    work.wait()


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """torch has no options for this: a communicator reads them from the environment when it is made.

    With blocking waits it starts neither the watchdog nor what dumps and ends the process for it; the second is for
    versions of torch that start them all the same.
    """
    ours = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    with _CONSTRUCTION:  # or two of them would put back each other's values
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
