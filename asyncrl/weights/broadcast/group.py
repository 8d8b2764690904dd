"""A process group of its own for weights, between processes that share no default group (gloo and nccl alike).

One store per publisher, bound to one address; every epoch of the group has its own key prefix, so a group can be
formed anew with other members while a broken one is still being torn down.
"""

# torch documents its stores at `torch.distributed` but does not list them in `__all__`.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from asyncrl.errors import WeightsError

Tag = TypeVar("Tag")


def host_store(host: str, timeout_s: float, port: int = 0) -> tuple[dist.TCPStore, int]:
    """Serve a store on `host` only (the default of torch is every interface), by default on a free port.

    Raises:
        OSError: `host` is no address of this machine, or the port is taken.
    """
    (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    listener = socket.create_server((host, port), family=family, backlog=128)
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        host, port, None, True, timedelta(seconds=timeout_s), wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def own_address(towards: str) -> str:
    """This machine's address on the interface from which `towards` is reached; loopback for loopback."""
    (family, kind, _, _, place), *_ = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # of datagrams: nothing is sent
        return str(probe.getsockname()[0])


def connect_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Raises WeightsError when nobody answers there within `timeout_s`."""
    try:
        # A bare socket first: the client of torch retries for its whole timeout where nobody listens.
        socket.create_connection((host, port), timeout=min(timeout_s, 5.0)).close()
        return dist.TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        raise WeightsError(f"the publisher's store at {host}:{port} does not answer: {error}") from error


_PIECE = 4 << 20
"""Bytes that gloo sends at a time. What arrived is hashed while the next piece is on its way; shorter and longer ones
pass through the sockets more slowly."""
STRETCH = 64 << 20
"""Bytes of one buffer that get the timeout together: a single tensor may be much larger than a bucket should be."""


class WeightGroup:
    """One epoch of the group: rank 0 is the publisher, ranks 1.. its subscribers.

    Joining, every buffer (of a long one each 64 MiB, all their pieces together) and leaving are bounded by `timeout_s`;
    any of them raises RuntimeError when a member dies, stays silent or is too slow, and the group is useless from then
    on.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        backend: str,
        host: str,
        epoch: int,
        rank: int,
        world: int,
        timeout_s: float,
        device: torch.device | None = None,
    ) -> None:
        self.epoch, self.rank, self.world = epoch, rank, world
        self.timeout_s, self._backend = timeout_s, backend
        self._deadline = 0.0
        """By `time.monotonic()`, of the stretch that is on its way."""
        timeout = timedelta(seconds=timeout_s)
        prefixed = dist.PrefixStore(f"group/{epoch}", store)
        prefixed.set_timeout(timeout)
        if backend == "gloo":
            options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            options._timeout = timeout  # pyright: ignore[reportAttributeAccessIssue]
            # Left to itself gloo listens wherever the machine's own name leads.
            interface = dist.ProcessGroupGloo.create_device(hostname=own_address(host))
            options._devices = [interface]  # pyright: ignore[reportAttributeAccessIssue]
            self._group = dist.ProcessGroupGloo(prefixed, rank, world, options)
        else:
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            nccl.is_high_priority_stream = True
            self._group = dist.ProcessGroupNCCL(prefixed, rank, world, nccl)
            self._group.eager_connect_single_device(device)

    def pieces(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Flat `buffer` as it is broadcast, in the same parts at both ends. nccl cuts for itself and gets long ones.

        To be taken one by one, as they are broadcast: the first of a stretch starts its deadline.
        """
        for stretch in buffer.split(STRETCH) if len(buffer) else ():
            self._deadline = time.monotonic() + self.timeout_s
            yield from stretch.split(_PIECE) if self._backend == "gloo" else (stretch,)

    def broadcast(self, buffer: torch.Tensor) -> dist.Work:
        """Send (rank 0) or receive into `buffer`, a piece; `.wait()` raises RuntimeError if a member is gone or silent.

        Raises:
            RuntimeError: nothing is left of the time for the pieces of one buffer.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self._left_s())
        return self._group.broadcast([buffer], options)  # pyright: ignore[reportAttributeAccessIssue]

    def wait(self, work: dist.Work) -> None:
        """Until `work` is done. Raises RuntimeError when a member is gone, or the buffer's deadline has passed."""
        if self._backend == "gloo":
            work.wait()
            return
        # nccl only enqueues: this waits for the peers' GPUs, with a deadline of our own instead of its watchdog's.
        while not work.is_completed():
            if time.monotonic() >= self._deadline:
                self.abort()
            self._left_s()
            time.sleep(0.0005)
        work.wait()

    def _left_s(self) -> float:
        """Seconds for what is missing of the stretch, at least the millisecond that torch counts in."""
        left = self._deadline - time.monotonic()
        if left <= 0.0:
            whom = (
                f"one of its {self.world - 1} subscribers" if self.rank == 0 else "the publisher or another subscriber"
            )
            raise RuntimeError(
                f"epoch {self.epoch}: a bucket was not through after {self.timeout_s} s, {whom} is silent or too slow"
            )
        return max(left, 0.001)

    def abort(self) -> None:
        """Leave at once; whoever still waits in this group gets an error now instead of a timeout."""
        self._group.abort()


def passed(group: WeightGroup, flow: Iterable[tuple[Tag, torch.Tensor]]) -> Iterator[Tag]:
    """Broadcast the pieces of `flow`, two at a time; yields the tag of each when it is through, in order.

    What the caller does with one happens beside the next, and the wire never waits for a thread that has to wake up.
    """
    on_their_way: deque[tuple[Tag, dist.Work]] = deque()
    for tag, piece in flow:
        on_their_way.append((tag, group.broadcast(piece)))
        if len(on_their_way) == 2:
            tag, work = on_their_way.popleft()
            group.wait(work)
            yield tag
    for tag, work in on_their_way:
        group.wait(work)
        yield tag
