"""Buffers for the pieces of buckets while they are sent or received."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from asyncrl.weights.boxes import flat_parts
from asyncrl.weights.ipc import shared_bytes
from asyncrl.weights.manifest import Bucket, Entry


class StagingBuffers:
    """A few buffers that are used in turns, kept across all versions.

    Args:
        device: where they are.
        count: number of pieces that are in use at a time.
        shared: allocate them in memory that other processes of this machine can open.
    """

    def __init__(self, device: torch.device | str, *, count: int, shared: bool = False) -> None:
        self._device, self.shared = torch.device(device), shared
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * count
        self._pinned = False
        self._scratch = torch.empty(0, dtype=torch.uint8)
        """On the device of the weights, if the buffers are in host memory: a piece is cast there."""

    def reserve(self, nbytes: int, source: torch.device | None = None) -> None:
        """Make room for pieces of at most `nbytes`; called while no buffer is in use.

        Args:
            source: device that the buffers are filled from.
        """
        from_gpu = source is not None and source.type == "cuda" and self._device.type == "cpu"
        if nbytes > len(self._buffers[0]) or (from_gpu and not self._pinned):
            self._pinned = from_gpu and not self.shared
            self._buffers = [self._made(max(nbytes, len(self._buffers[0]))) for _ in self._buffers]
        if from_gpu and len(self._scratch) < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=source)

    def _made(self, nbytes: int) -> torch.Tensor:
        if self.shared and self._device.type == "cpu":
            return shared_bytes(nbytes)
        made = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return made.pin_memory() if self._pinned else made

    def take(self, number: int, nbytes: int) -> torch.Tensor:
        """Return the buffer for the piece with this number; the piece `count` before it is no longer in use."""
        return self._buffers[number % len(self._buffers)][:nbytes]

    def fill(
        self, number: int, nbytes: int, bucket: Bucket, start: int, tensors: Mapping[str, torch.Tensor]
    ) -> FilledPiece:
        """Start to fill the buffer of a piece by `pack`; the copies are queued on this thread's stream."""
        buffer = self.take(number, nbytes)
        sources = {t.device for t in tensors.values()}
        gpu = next((device for device in (*sources, self._device) if device.type == "cuda"), None)
        if gpu is None:
            pack(bucket, start, buffer, tensors)
            return FilledPiece(buffer, None)
        if self._device.type == "cpu":
            scratch = self._scratch[:nbytes]
            pack(bucket, start, scratch, tensors)
            buffer.copy_(scratch, non_blocking=True)
        else:
            pack(bucket, start, buffer, tensors)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(gpu))
        return FilledPiece(buffer, done)


@dataclass(frozen=True, slots=True)
class FilledPiece:
    _buffer: torch.Tensor
    _done: torch.cuda.Event | None

    def wait(self) -> torch.Tensor:
        """Return the piece, once it is there for other threads and processes."""
        if self._done is not None:
            self._done.synchronize()
        return self._buffer


@torch.no_grad()
def pack(bucket: Bucket, start: int, room: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set `room` to the bytes of the bucket from `start` on, taken from tensors (by entry) that need not be contiguous
    or in the wire dtype. A tensor on another device is copied as it is, and cast where `room` is."""
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
        values[done : done + part.numel()].view(part.shape).copy_(part.to(room.device))
        done += part.numel()
