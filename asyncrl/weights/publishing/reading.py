"""Sends a version directly from the weights, without a copy of them (`weights.copies=none`).

    sender    open: each piece is cast into one of two buffers, hashed and sent, as often as needed
    learner   publish(v), forward, backward, optimizer -> waits until v was sent once and nothing is read -> step

Weights change only in the optimizer step. After it the version cannot be sent any more: who missed it gets the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from asyncrl.errors import WeightsError, WeightsGoneError
from asyncrl.weights.boxes import flat_parts
from asyncrl.weights.ipc import shared_bytes
from asyncrl.weights.manifest import Bucket, Entry

Ordered = Callable[[Callable[[], None]], None]
"""Runs work that reads the weights after everything that was enqueued on a GPU when they were published; returns when
it is done."""


class Rooms:
    """Buffers for pieces while they are sent or received, two at a time (`group.passed`). Kept across all versions.

    Args:
        shared: allocate them in memory that other processes of this machine can open.
    """

    def __init__(self, device: torch.device | str, *, shared: bool) -> None:
        self._device, self._shared = torch.device(device), shared
        self._rooms = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]

    def reserve(self, nbytes: int) -> None:
        """Make room for pieces of at most `nbytes`; called while nothing is being sent."""
        if nbytes > len(self._rooms[0]):
            self._rooms = [self._made(nbytes) for _ in self._rooms]

    def _made(self, nbytes: int) -> torch.Tensor:
        if self._shared and self._device.type == "cpu":
            return shared_bytes(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def take(self, number: int, nbytes: int) -> torch.Tensor:
        """Return the buffer for the piece with this number; the piece two before it is no longer read."""
        return self._rooms[number % 2][:nbytes]


class Reading:
    """The weights of one version, until the learner writes to them.

    Args:
        tensors: by name.
        wait_s: longest wait for the sender.
    """

    def __init__(
        self, policy_version: int, tensors: Mapping[str, torch.Tensor], ordered: Ordered, wait_s: float
    ) -> None:
        self._version, self._tensors = policy_version, tensors
        self._ordered, self._wait_s = ordered, wait_s
        self._condition = threading.Condition()
        self._readers = 0
        self._due, self._wanted = True, False

    @property
    def gone(self) -> bool:
        """Whether it is too late to start reading: the learner writes, or waits to write."""
        return self._wanted and not self._due

    @contextmanager
    def open(self) -> Iterator[None]:
        """Hold the weights unchanged. A body that ends without an error has sent them, and the learner waits for no
        more.

        Raises:
            WeightsGoneError: the weights have changed, or are about to.
        """
        with self._condition:
            if self.gone:
                raise WeightsGoneError(f"the learner's weights are no longer those of version {self._version}")
            self._readers += 1
        sent = False
        try:
            yield
            sent = True
        finally:
            with self._condition:
                self._readers -= 1
                self._due = self._due and not sent
                self._condition.notify_all()

    def give_up(self) -> None:
        """No receiver is present, or all have received it: the learner need not wait."""
        with self._condition:
            self._due = False
            self._condition.notify_all()

    def wait(self, *, to_write: bool) -> float:
        """Wait until the version was sent, or given up, and nobody reads it; returns the seconds. With `to_write`
        nobody can start to read from then on.

        Raises:
            WeightsError: it is still being sent after `wait_s`.
        """
        started = time.perf_counter()
        with self._condition:
            self._wanted = self._wanted or to_write
            if not self._condition.wait_for(lambda: not self._due and not self._readers, self._wait_s):
                raise WeightsError(
                    f"version {self._version} is still being sent out of the learner's weights after {self._wait_s:.0f}"
                    " s: a worker takes too long. See its log, raise weights.timeout_s, or set "
                    "weights.copies=two, with which training goes on meanwhile."
                )
        return time.perf_counter() - started

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The weights, by name. Only valid while open."""
        return self._tensors

    def packed(
        self, bucket: Bucket, start: int, room: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Fill `room` by `pack` with parts of the weights, and return it. Only valid while open."""
        self._ordered(lambda: pack(bucket, start, room, tensors))
        return room


@torch.no_grad()
def pack(bucket: Bucket, start: int, room: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set `room` to the bytes of the bucket from `start` on, taken from tensors (by entry) that need not be contiguous
    or in the wire dtype."""
    stop, done = start + len(room), start
    for entry in bucket.entries:
        first, last = max(entry.offset, start), min(entry.offset + entry.nbytes, stop)
        if first < last:
            room[done - start : first - start].zero_()  # padding between tensors: the same in every fingerprint
            _put(entry, first, room[first - start : last - start], tensors[entry.name])
            done = last
    room[done - start :].zero_()


def _put(entry: Entry, first: int, room: torch.Tensor, tensor: torch.Tensor) -> None:
    values, done = room.view(entry.dtype), 0
    for part in flat_parts(tensor, (first - entry.offset) // entry.dtype.itemsize, len(values)):
        values[done : done + part.numel()].view(part.shape).copy_(part)
        done += part.numel()
