"""A process group for weights only, between processes that share no default group (the same for gloo and nccl).

One store per publisher, bound to one address. Every epoch of the group has its own key prefix, so a group can be formed
again with other members while a broken one is still being torn down.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from asyncrl.errors import WeightsError
from asyncrl.weights.broadcast.forming import Forming
from asyncrl.weights.broadcast.silence import end_all_when_silent
from asyncrl.weights.broadcast.wires import Link, open_wire

Tag = TypeVar("Tag")


def publisher_store(host: str, timeout_s: float, port: int) -> tuple[dist.TCPStore, int]:
    """Serve the store for weights, see `host_store`. Raises WeightsError: it cannot listen there."""
    try:
        return host_store(host, timeout_s, port)
    except OSError as error:
        raise WeightsError(
            f"weights.host={host} weights.port={port}: the learner cannot send its weights from there: {error}. Name "
            "an address of its machine and a free port; weights.port=0 takes any"
        ) from error


def host_store(host: str, timeout_s: float, port: int = 0) -> tuple[dist.TCPStore, int]:
    """Serve a store on `host` only (torch's default is every interface), by default on a free port.

    Raises:
        OSError: `host` is not an address of this machine, or the port is taken.
    """
    (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    listener = socket.create_server((host, port), family=family, backlog=128)
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        host, port, None, True, timedelta(seconds=timeout_s), wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def connect_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect to the store. Raises WeightsError if nobody answers within `timeout_s`. Its calls raise DistError
    once its machine has been silent for that long."""
    try:
        # A bare socket first: torch's client retries for its whole timeout if nobody listens.
        socket.create_connection((host, port), timeout=min(timeout_s, 5.0)).close()
        store = dist.TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
        end_all_when_silent(port, timeout_s)
        return store
    except (OSError, RuntimeError) as error:
        said = f"the publisher's store at {host}:{port} does not answer: {error}"
        raise WeightsError(f"{said}. If a learner is running, this machine cannot reach it at weights.host") from error


def store_of_epoch(store: dist.Store, epoch: int) -> dist.Store:
    """Store of all groups of an epoch."""
    return dist.PrefixStore(f"group/{epoch}", store)


STRETCH = 64 << 20
"""Bytes of a buffer that share one timeout: a single tensor may be much larger than a bucket should be."""


class WeightGroup:
    """One epoch of the group: rank 0 sends, ranks 1.. are the subscribers. Each sender has its own group, and one per
    lane (`weights.flows`) if subscribers want different parts: `name` tells them apart.

    Joining, every buffer (of a long one every 64 MiB, all their pieces together) and leaving are bounded by
    `timeout_s`; each raises RuntimeError if a member dies, stays silent or is too slow, and the group is unusable from
    then on.

    Args:
        watch: of the publisher: called while the group forms; says that a member has died, or nothing.
    """

    def __init__(
        self,
        store: dist.Store,
        link: Link,
        *,
        epoch: int,
        rank: int,
        world: int,
        name: str = "0",
        watch: Callable[[], str] | None = None,
    ) -> None:
        self.epoch, self.rank, self.world = epoch, rank, world
        self.timeout_s = link.timeout_s
        self._deadline = 0.0
        """Deadline of the present stretch, by `time.monotonic()`."""
        of_epoch = store_of_epoch(store, epoch)
        prefixed = dist.PrefixStore(name, of_epoch)
        prefixed.set_timeout(timedelta(seconds=link.timeout_s))
        forming = Forming(of_epoch, watch)
        try:
            self._wire = open_wire(prefixed, forming, link, rank, world)
        except RuntimeError as error:
            forming.give_up(str(error).splitlines()[0])
            raise

    def pieces(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield flat `buffer` as it is broadcast, in the same parts at both ends. nccl divides buffers itself and gets
        long ones.

        Take them one by one, as they are broadcast: the first of a stretch starts its deadline.
        """
        for stretch in buffer.split(STRETCH) if len(buffer) else ():
            self._deadline = time.monotonic() + self.timeout_s
            yield from stretch.split(min(self._wire.piece_bytes, STRETCH))

    def broadcast(self, buffer: torch.Tensor) -> Any:
        """Send (rank 0) or receive into `buffer`, a piece; returns a handle for `wait`.

        Raises:
            RuntimeError: no time is left for the pieces of this buffer.
        """
        return self._wire.broadcast(buffer, self._left_s())

    def wait(self, work: Any) -> None:
        """Wait until `work` is done. Raises RuntimeError if a member is gone, or the buffer's deadline has passed."""
        self._wire.wait(work, max(self._deadline - time.monotonic(), 0.0))

    def _left_s(self) -> float:
        """Seconds left for the stretch, at least one millisecond, torch's unit."""
        left = self._deadline - time.monotonic()
        if left <= 0.0:
            whom = (
                f"one of its {self.world - 1} subscribers" if self.rank == 0 else "the publisher or another subscriber"
            )
            raise RuntimeError(
                f"epoch {self.epoch}: a bucket was not transferred within {self.timeout_s} s, {whom} is silent or too "
                "slow"
            )
        return max(left, 0.001)

    def abort(self) -> None:
        """Leave at once; whoever still waits in this group gets an error now instead of a timeout."""
        self._wire.abort()


def piece_sizes(group: WeightGroup, nbytes: int) -> Iterator[int]:
    """Sizes of the `pieces` of a buffer of `nbytes`."""
    return map(len, group.pieces(torch.empty(nbytes, dtype=torch.uint8, device="meta")))


def passed(flow: Iterable[tuple[Tag, WeightGroup, torch.Tensor]]) -> Iterator[Tag]:
    """Broadcast the pieces of `flow`, each in its group, two at a time; yields the tag of each once it is through, in
    order.

    The caller processes one piece while the next is being sent, and the wire never waits for a thread to wake up.
    """
    on_their_way: deque[tuple[Tag, WeightGroup, Any]] = deque()
    for tag, group, piece in flow:
        on_their_way.append((tag, group, group.broadcast(piece)))
        if len(on_their_way) == 2:
            tag, group, work = on_their_way.popleft()
            group.wait(work)
            yield tag
    for tag, group, work in on_their_way:
        group.wait(work)
        yield tag
