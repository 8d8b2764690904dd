"""Receives the buckets of a plan: puts the pieces of each in their places in staging."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from asyncrl.weights.boxes import write_flat
from asyncrl.weights.broadcast.group import WeightGroup, passed, piece_sizes
from asyncrl.weights.fingerprint import Fingerprint
from asyncrl.weights.manifest import Bucket
from asyncrl.weights.plan import SendPlan
from asyncrl.weights.publishing.buffers import StagingBuffers


@dataclass(frozen=True, slots=True)
class _Arrived:
    bucket: int
    start: int
    """Offset of the piece in the bucket."""
    piece: torch.Tensor
    placed: bool
    """Whether it was received directly at its place."""


class BucketReceiver:
    """Receives what a plan sends to this process, for each version.

    Args:
        groups: of the lanes that this process is in, by lane.
        place: device that the groups receive into; from a device other than the host each piece is copied to host
            memory.
    """

    def __init__(self, plan: SendPlan, groups: Mapping[int, WeightGroup], place: torch.device | str) -> None:
        self._plan, self._place = plan, torch.device(place)
        self._groups = [groups.get(lane) for lane in plan.bucket_lanes]
        self._buffers = StagingBuffers(place, count=2)
        self._bounce = torch.empty(0, dtype=torch.uint8)
        """Pinned host memory for a piece from a device that is not contiguous in staging."""

    @property
    def bounce_bytes(self) -> int:
        return len(self._bounce)

    def receive(
        self,
        target: Callable[[str], torch.Tensor],
        buffer: Callable[[int], torch.Tensor] | None = None,
    ) -> list[str]:
        """Receive one version; returns the fingerprints of the buckets, "" for buckets that are not for this process.

        Args:
            target: the place in staging of an entry of the plan that this process gets.
            buffer: the place of a whole bucket, where staging has the layout of the plan.

        Raises:
            RuntimeError: a member of a group died or fell silent.
        """
        longest = max((max(sizes, default=0) for sizes in self._sizes()), default=0)
        if self._place.type != "cpu" or buffer is None:
            self._buffers.reserve(longest)
        if buffer is None and self._place.type != "cpu" and len(self._bounce) < longest:
            self._bounce = torch.empty(longest, dtype=torch.uint8).pin_memory()
        prints = [Fingerprint() for _ in self._groups]
        for arrived in passed(self._pieces(target, buffer)):
            prints[arrived.bucket].update(arrived.piece)  # while the next one arrives
            if not arrived.placed:
                self._put(arrived, target, buffer)
        return [
            fingerprint.hex() if group is not None else ""
            for fingerprint, group in zip(prints, self._groups, strict=True)
        ]

    def _sizes(self) -> Iterator[Iterator[int]]:
        for bucket, group in zip(self._plan.manifest.buckets, self._groups, strict=True):
            if group is not None:
                yield piece_sizes(group, bucket.nbytes)

    def _pieces(
        self, target: Callable[[str], torch.Tensor], buffer: Callable[[int], torch.Tensor] | None
    ) -> Iterator[tuple[_Arrived, WeightGroup, torch.Tensor]]:
        count = 0
        for index, (bucket, group) in enumerate(zip(self._plan.manifest.buckets, self._groups, strict=True)):
            if group is None:
                continue
            start = 0
            for size in piece_sizes(group, bucket.nbytes):
                piece = None
                if self._place.type == "cpu":
                    piece = (
                        buffer(index)[start : start + size]
                        if buffer is not None
                        else _contiguous_place(bucket, start, size, target)
                    )
                placed = piece is not None
                if piece is None:
                    piece = self._buffers.take(count, size)
                    count += 1
                yield _Arrived(index, start, piece, placed), group, piece
                start += size

    def _put(
        self,
        arrived: _Arrived,
        target: Callable[[str], torch.Tensor],
        buffer: Callable[[int], torch.Tensor] | None,
    ) -> None:
        """Copy a piece to its place. Pieces are cut, and tensors begin, at multiples of 16 bytes."""
        piece, start = arrived.piece, arrived.start
        if buffer is not None:
            buffer(arrived.bucket)[start : start + len(piece)].copy_(piece)
            return
        if piece.device.type != "cpu":
            piece = self._bounce[: len(piece)].copy_(piece)
        for entry in self._plan.manifest.buckets[arrived.bucket].entries:
            first, last = max(entry.offset, start), min(entry.offset + entry.nbytes, start + len(piece))
            if first < last:
                values = piece[first - start : last - start].view(entry.dtype)
                write_flat(target(entry.name), (first - entry.offset) // entry.dtype.itemsize, values)


def _contiguous_place(
    bucket: Bucket, start: int, size: int, target: Callable[[str], torch.Tensor]
) -> torch.Tensor | None:
    """The bytes of staging that a piece belongs to, if they are of one tensor and contiguous; otherwise None."""
    for entry in bucket.entries:
        if entry.offset <= start and start + size <= entry.offset + entry.nbytes:
            box = target(entry.name)
            first = start - entry.offset
            return box.view(-1).view(torch.uint8)[first : first + size] if box.is_contiguous() else None
    return None
