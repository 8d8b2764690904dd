"""Sends one version as rank 0 of a group: buckets as they are copied."""

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
from asyncrl.weights.manifest import Bucket
from asyncrl.weights.plan import SendPlan
from asyncrl.weights.publishing.reading import Rooms, pack
from asyncrl.weights.publishing.snapshot import Snapshot


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


def send(sending: SendGroups, snapshot: Snapshot, rooms: Rooms) -> tuple[int, list[str]]:
    """Send everything to all members, each piece as soon as it has been copied; returns the bytes sent, and the
    fingerprints of the buckets.

    Args:
        rooms: buffers for pieces that are not contiguous in the snapshot.

    Raises:
        RuntimeError: a member is gone or too slow; WeightsError if the copy took half of the time or all of it.
    """
    if not sending.groups:
        return 0, []
    copied = _Copied(max(group.timeout_s for group in sending.groups.values()), snapshot)
    packed = sending.plan.cuts or snapshot.reading is not None
    with copied.blamed():
        prints = (_send_parts if packed else _send_buckets)(sending, copied, rooms)
    snapshot.filling.wait()
    return sending.plan.manifest.nbytes, prints if packed else snapshot.all_fingerprints()


def _send_buckets(sending: SendGroups, copied: _Copied, _: Rooms) -> list[str]:
    """Send the buckets of the snapshot as they are. Those on a device are hashed meanwhile; others when copied."""
    (group,) = sending.groups.values()
    for index in passed(copied.whole(group)):
        if copied.snapshot.on_device:
            copied.snapshot.fingerprint(index)  # while the next one is being sent
    return []


def _send_parts(sending: SendGroups, copied: _Copied, rooms: Rooms) -> list[str]:
    """Send parts of the tensors, each to its lane; the next piece is packed and hashed while one is being sent."""
    plan = sending.plan
    tensors = copied.parts(plan)
    prints = [Fingerprint() for _ in plan.bucket_lanes]
    ways = [
        (bucket, sending.groups[lane]) for bucket, lane in zip(plan.manifest.buckets, plan.bucket_lanes, strict=True)
    ]

    def pieces() -> Iterator[tuple[None, WeightGroup, torch.Tensor]]:
        number = 0
        for (bucket, group), fingerprint in zip(ways, prints, strict=True):
            start = 0
            for size in piece_sizes(group, bucket.nbytes):
                if start % STRETCH == 0:
                    copied.stood_s = 0.0
                piece = copied.packed(bucket, start, rooms.take(number, size), tensors)
                fingerprint.update(piece)
                yield None, group, piece
                start, number = start + size, number + 1

    rooms.reserve(max((size for bucket, group in ways for size in piece_sizes(group, bucket.nbytes)), default=0))
    for _ in passed(pieces()):
        pass
    return [fingerprint.hex() for fingerprint in prints]


class _Copied:
    """A snapshot, as far as it is final.

    Raises:
        WeightsError: within one stretch the copy stood still for as long as the members wait for all of it.
    """

    def __init__(self, timeout_s: float, snapshot: Snapshot) -> None:
        self.timeout_s, self.snapshot = timeout_s, snapshot
        self._ends: dict[str, int] = {}
        """Number of final bytes after which each part of the plan is final."""
        self.stood_s = 0.0
        """Seconds of the present stretch during which there was nothing to send."""

    def whole(self, group: WeightGroup) -> Iterator[tuple[int, WeightGroup, torch.Tensor]]:
        """Yield bucket index, group and piece, each once it is final."""
        done = 0
        for index, buffer in enumerate(self.snapshot.buffers):
            for stretch in buffer.split(STRETCH):
                self.stood_s = 0.0
                for piece in group.pieces(stretch):
                    done += len(piece)
                    self._wait(done)
                    yield index, group, piece

    def parts(self, plan: SendPlan) -> dict[str, torch.Tensor]:
        """The parts of the tensors, by entry of the plan."""
        snapshot = self.snapshot
        tensors, before, ends = {}, 0, {}
        for bucket in snapshot.manifest.buckets:
            ends |= {entry.name: before + entry.offset + entry.nbytes for entry in bucket.entries}
            before += bucket.nbytes
        held = snapshot.reading.tensors if snapshot.reading else snapshot.manifest.views(snapshot.buffers)
        for entry, (name, box) in plan.parts.items():
            tensors[entry] = held[name][slices(box)]
            self._ends[entry] = ends[name]
        return tensors

    def packed(
        self, bucket: Bucket, start: int, room: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Set `room` to the bytes of the plan's bucket from `start` on, once their sources are final."""
        snapshot, stop = self.snapshot, start + len(room)
        of = [e.name for e in bucket.entries if e.offset < stop and start < e.offset + e.nbytes]
        self._wait(max((self._ends[name] for name in of), default=0))
        if snapshot.reading is not None:
            return snapshot.reading.packed(bucket, start, room, tensors)
        pack(bucket, start, room, tensors)
        if room.device.type == "cuda":
            torch.cuda.current_stream(room.device).synchronize()  # another thread sends it
        return room

    def _wait(self, reached: int) -> None:
        began = time.monotonic()
        self.snapshot.filling.wait(reached)
        self.stood_s += time.monotonic() - began
        if self.stood_s >= self.timeout_s:
            raise WeightsError(self.why())

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Correct the blame: a group only knows that bytes did not come through, and blames a subscriber."""
        try:
            yield
        except WeightsError:
            raise
        except RuntimeError as error:
            if self.stood_s < self.timeout_s / 2:
                raise
            raise WeightsError(f"{self.why()} Errors about subscribers came after that: {error}") from error

    def why(self) -> str:
        return (
            f"the copy out of the learner stood still for {self.stood_s:.1f} s of weights.timeout_s="
            f"{self.timeout_s:g}: a learner rank is slow in the gather. See its log, or raise weights.timeout_s."
        )
