"""Where a sender's share lands: pieces of its buckets, put to their boxes of the whole tensors in staging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from asyncrl.weights.broadcast.group import WeightGroup, passed
from asyncrl.weights.fingerprint import Fingerprint
from asyncrl.weights.manifest import Bucket, Entry
from asyncrl.weights.shares import Share, flat_parts, slices

_AT_ONCE = 2
"""Pieces that are on their way or being read (`group.passed`): as many rooms for them are enough."""


@dataclass(frozen=True, slots=True)
class _Landed:
    bucket: int
    start: int
    """Of the piece, in the bucket."""
    piece: torch.Tensor
    placed: bool
    """It was received where it belongs."""


class ShareLanding:
    """Receives one sender's share of a version, as often as it comes.

    Args:
        place: what the group receives into; what is no memory of the host is copied there piece by piece.
    """

    def __init__(self, share: Share, place: torch.device | str) -> None:
        self._share, self._place = share, place
        self._rooms: list[torch.Tensor] = []

    def receive(self, group: WeightGroup, views: Mapping[str, torch.Tensor]) -> list[str]:
        """Into `views`, whole tensors by name; returns the fingerprints of the share's buckets.

        Raises:
            RuntimeError: a member of the group died or fell silent.
        """
        buckets = self._share.manifest.buckets
        prints = [Fingerprint() for _ in buckets]
        for landed in passed(group, self._flow(group, views)):
            prints[landed.bucket].update(landed.piece)  # the next one is arriving
            piece = landed.piece if self._place == "cpu" else landed.piece.cpu()
            if not landed.placed:
                self._put(buckets[landed.bucket], landed.start, piece, views)
        return [fingerprint.hex() for fingerprint in prints]

    def _flow(self, group: WeightGroup, views: Mapping[str, torch.Tensor]) -> Iterator[tuple[_Landed, torch.Tensor]]:
        count = 0
        for index, bucket in enumerate(self._share.manifest.buckets):
            start = 0
            for size in map(len, group.pieces(torch.empty(bucket.nbytes, dtype=torch.uint8, device="meta"))):
                piece = self._own_place(bucket, start, size, views)
                placed = piece is not None
                if piece is None:
                    piece = self._room(count % _AT_ONCE, size)
                    count += 1
                yield _Landed(index, start, piece, placed), piece
                start += size

    def _own_place(
        self, bucket: Bucket, start: int, size: int, views: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """The bytes of staging that the piece is, where they are of one tensor and lie together."""
        for entry in bucket.entries:
            if self._place == "cpu" and entry.offset <= start and start + size <= entry.offset + entry.nbytes:
                box = views[entry.name][self._slices(entry)]
                first = start - entry.offset
                return box.view(-1).view(torch.uint8)[first : first + size] if box.is_contiguous() else None
        return None

    def _room(self, number: int, size: int) -> torch.Tensor:
        while len(self._rooms) <= number:
            self._rooms.append(torch.empty(0, dtype=torch.uint8, device=self._place))
        if len(self._rooms[number]) < size:
            self._rooms[number] = torch.empty(size, dtype=torch.uint8, device=self._place)
        return self._rooms[number][:size]

    def _put(self, bucket: Bucket, start: int, piece: torch.Tensor, views: Mapping[str, torch.Tensor]) -> None:
        """Each tensor's part of the piece to its place. Pieces are cut, and tensors begin, at multiples of 16 bytes."""
        for entry in bucket.entries:
            first, last = max(entry.offset, start), min(entry.offset + entry.nbytes, start + len(piece))
            if first < last:
                values = piece[first - start : last - start].view(entry.dtype)
                write_flat(
                    views[entry.name][self._slices(entry)], (first - entry.offset) // entry.dtype.itemsize, values
                )

    def _slices(self, entry: Entry) -> tuple[slice, ...]:
        return slices(self._share.boxes[entry.name])


def write_flat(target: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """`target.flatten()[start:start + len(values)] = values` for a `target` that need not lie together."""
    done = 0
    for part in flat_parts(target, start, len(values)):
        part.copy_(values[done : done + part.numel()].view(part.shape))
        done += part.numel()
