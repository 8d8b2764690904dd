"""Sends one version as rank 0 of the groups of an epoch, piece by piece out of the learner's parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.boxes import slices
from asyncrl.weights.broadcast.group import STRETCH, WeightGroup, passed, piece_sizes
from asyncrl.weights.fingerprint import Fingerprint
from asyncrl.weights.plan import SendPlan
from asyncrl.weights.publishing.buffers import FilledPiece, StagingBuffers
from asyncrl.weights.publishing.version import Buckets, Version

IN_USE = 3
"""Pieces that are in use at a time: two on the wire, and one that is being filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendGroups:
    """The groups of an epoch, one for each lane of the plan."""

    plan: SendPlan
    groups: Mapping[int, WeightGroup]

    @classmethod
    def form(cls, form: Callable[[str, int], WeightGroup], plan: SendPlan) -> SendGroups:
        """Form the groups one after another, in the order in which the receivers form them.

        Args:
            form: forms a group of this name and number of members.

        Raises:
            RuntimeError: one did not form; the others are left.
        """
        groups: dict[int, WeightGroup] = {}
        try:
            for lane in sorted(set(plan.bucket_lanes)):
                groups[lane] = form(str(lane), len(plan.lanes[lane]) + 1)
        except RuntimeError:
            for group in groups.values():
                group.abort()
            raise
        return cls(plan=plan, groups=groups)

    def abort(self) -> None:
        for group in self.groups.values():
            group.abort()


def send(
    sending: SendGroups, version: Version, buckets: Buckets, place: torch.device | str, buffers: StagingBuffers
) -> tuple[int, list[str]]:
    """Send everything to all members; returns the bytes sent, and the fingerprints of the plan's buckets.

    Args:
        place: device that the groups send from.

    Raises:
        RuntimeError: a member is gone or too slow; WeightsError if the gather took half of the time or all of it.
    """
    if not sending.groups:
        return 0, []
    plan, blame = sending.plan, _Blame(max(group.timeout_s for group in sending.groups.values()))
    prints = [Fingerprint() for _ in plan.bucket_lanes]
    source_of = {entry.name: i for i, bucket in enumerate(plan.whole.buckets) for entry in bucket.entries}
    ways = [
        (bucket, sending.groups[lane]) for bucket, lane in zip(plan.manifest.buckets, plan.bucket_lanes, strict=True)
    ]
    place = torch.device(place)
    as_they_are = not plan.cuts and version.gathered_on == place and not buffers.shared

    def filled() -> Iterator[tuple[int, WeightGroup, FilledPiece]]:
        count = 0
        for index, (bucket, group) in enumerate(ways):
            source = source_of[plan.parts[bucket.entries[0].name][0]]
            blame.stood_s = 0.0
            with blame.waiting():
                contents = buckets.take(source)
            whole = contents.buffer if as_they_are else None
            tensors = {
                entry.name: contents.tensors[plan.parts[entry.name][0]][slices(plan.parts[entry.name][1])]
                for entry in bucket.entries
            }
            start = 0
            for size in piece_sizes(group, bucket.nbytes):
                if start and start % STRETCH == 0:
                    blame.stood_s = 0.0
                if whole is not None:
                    yield index, group, as_it_is(whole[start : start + size])
                else:
                    yield index, group, buffers.fill(count, size, bucket, start, tensors)
                    count += 1
                start += size

    def pieces() -> Iterator[tuple[None, WeightGroup, torch.Tensor]]:
        before: tuple[int, WeightGroup, FilledPiece] | None = None
        for ahead in filled():  # the copies of one are under way while the one before is hashed and sent
            if before is not None:
                yield ready(before)
            before = ahead
        if before is not None:
            yield ready(before)

    def ready(found: tuple[int, WeightGroup, FilledPiece]) -> tuple[None, WeightGroup, torch.Tensor]:
        index, group, piece = found[0], found[1], found[2].wait()
        prints[index].update(piece)
        return None, group, piece

    longest = max((size for bucket, group in ways for size in piece_sizes(group, bucket.nbytes)), default=0)
    if not as_they_are:
        buffers.reserve(longest, version.device)
    with blame.corrected():
        for _ in passed(pieces()):
            pass
    return plan.manifest.nbytes, [fingerprint.hex() for fingerprint in prints]


def as_it_is(piece: torch.Tensor) -> FilledPiece:
    """A piece that lies where it is sent from."""
    done = None
    if piece.device.type == "cuda":
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(piece.device))
    return FilledPiece(piece, done)


class _Blame:
    """Tells a slow gather from a slow subscriber: a group only knows that bytes did not come through."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.stood_s = 0.0
        """Seconds since the present stretch began during which there was nothing to send."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Raises WeightsError: there was nothing to send for as long as the members wait for all of a stretch."""
        began = time.monotonic()
        yield
        self.stood_s += time.monotonic() - began
        if self.stood_s >= self._timeout_s:
            raise WeightsError(self._why())

    @contextmanager
    def corrected(self) -> Iterator[None]:
        try:
            yield
        except WeightsError:
            raise
        except RuntimeError as error:
            if self.stood_s < self._timeout_s / 2:
                raise
            raise WeightsError(f"{self._why()} Errors about subscribers came after that: {error}") from error

    def _why(self) -> str:
        return (
            f"the gather of the learner's weights stood still for {self.stood_s:.1f} s of weights.timeout_s="
            f"{self._timeout_s:g}: a learner rank is slow. See its log, or raise weights.timeout_s."
        )
