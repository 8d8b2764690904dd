"""Receives a sender's flow: puts the pieces of its buckets in their places in staging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from asyncrl.weights.broadcast.group import WeightGroup, passed, piece_sizes
from asyncrl.weights.fingerprint import Fingerprint
from asyncrl.weights.manifest import Bucket
from asyncrl.weights.publishing.reading import Rooms
from asyncrl.weights.shares import flat_parts


@dataclass(frozen=True, slots=True)
class _Landed:
    bucket: int
    start: int
    """Offset of the piece in the bucket."""
    piece: torch.Tensor
    placed: bool
    """Whether it was received directly at its place."""


class FlowLanding:
    """Receives what one sender sends to this process, for each version.

    Args:
        buckets: the sender's buckets.
        groups: the group through which each bucket comes; None for a bucket that is not for this process.
        place: device that the group receives into; from a device other than the host each piece is copied to host
            memory.
    """

    def __init__(
        self, buckets: Sequence[Bucket], groups: Sequence[WeightGroup | None], place: torch.device | str
    ) -> None:
        self._buckets, self._groups, self._place = buckets, groups, place
        self._rooms = Rooms(place, shared=False)

    def receive(self, targets: Mapping[str, torch.Tensor]) -> list[str]:
        """Receive into `targets`, by entry; returns the fingerprints of the buckets, "" for buckets that are not for
        this process.

        Raises:
            RuntimeError: a member of a group died or fell silent.
        """
        ways = zip(self._buckets, self._groups, strict=True)
        sizes = (size for bucket, group in ways if group is not None for size in piece_sizes(group, bucket.nbytes))
        self._rooms.reserve(max(sizes, default=0))
        prints = [Fingerprint() for _ in self._buckets]
        for landed in passed(self._flow(targets)):
            prints[landed.bucket].update(landed.piece)  # while the next one arrives
            piece = landed.piece if self._place == "cpu" else landed.piece.cpu()
            if not landed.placed:
                self._put(self._buckets[landed.bucket], landed.start, piece, targets)
        return [
            fingerprint.hex() if group is not None else ""
            for fingerprint, group in zip(prints, self._groups, strict=True)
        ]

    def _flow(self, targets: Mapping[str, torch.Tensor]) -> Iterator[tuple[_Landed, WeightGroup, torch.Tensor]]:
        count = 0
        for index, (bucket, group) in enumerate(zip(self._buckets, self._groups, strict=True)):
            if group is None:
                continue
            start = 0
            for size in piece_sizes(group, bucket.nbytes):
                piece = self._own_place(bucket, start, size, targets)
                placed = piece is not None
                if piece is None:
                    piece = self._rooms.take(count, size)
                    count += 1
                yield _Landed(index, start, piece, placed), group, piece
                start += size

    def _own_place(
        self, bucket: Bucket, start: int, size: int, targets: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """The bytes of staging that the piece belongs to, if they are of one tensor and contiguous; otherwise None."""
        for entry in bucket.entries:
            if self._place == "cpu" and entry.offset <= start and start + size <= entry.offset + entry.nbytes:
                box = targets[entry.name]
                first = start - entry.offset
                return box.view(-1).view(torch.uint8)[first : first + size] if box.is_contiguous() else None
        return None

    def _put(self, bucket: Bucket, start: int, piece: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy each tensor's part of the piece to its place. Pieces are cut, and tensors begin, at multiples of 16
        bytes."""
        for entry in bucket.entries:
            first, last = max(entry.offset, start), min(entry.offset + entry.nbytes, start + len(piece))
            if first < last:
                values = piece[first - start : last - start].view(entry.dtype)
                write_flat(targets[entry.name], (first - entry.offset) // entry.dtype.itemsize, values)


def write_flat(target: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """`target.flatten()[start:start + len(values)] = values` for a `target` that need not be contiguous."""
    done = 0
    for part in flat_parts(target, start, len(values)):
        part.copy_(values[done : done + part.numel()].view(part.shape))
        done += part.numel()
