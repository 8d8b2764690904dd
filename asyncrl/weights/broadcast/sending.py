"""Sends one version as rank 0 of a group: buckets as they are copied, or deltas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.boxes import within
from asyncrl.weights.broadcast.group import STRETCH, WeightGroup, passed
from asyncrl.weights.delta import Encoded, encode
from asyncrl.weights.fingerprint import Fingerprint
from asyncrl.weights.flows import Flow, Flows, all_of, lane_name
from asyncrl.weights.manifest import Bucket
from asyncrl.weights.publishing.reading import Reading, Rooms, pack
from asyncrl.weights.publishing.snapshot import Snapshot
from asyncrl.weights.shares import Share, slices


@dataclass(frozen=True, slots=True, kw_only=True)
class Deltas:
    """Changes since the version that all members have; empty for a version that is sent in full."""

    buckets: Sequence[Encoded] = ()
    copied_s: float = 0.0
    """Seconds from the first copied byte to the last; a version that is sent in full is sent during that time."""
    encode_s: float = 0.0


def encode_deltas(snapshot: Snapshot, previous: Snapshot) -> Deltas:
    """Encode the deltas. Raises WeightsError if the copy of `snapshot` fails."""
    snapshot.filling.wait(1)
    began = time.perf_counter()
    snapshot.filling.wait()
    copied = time.perf_counter()
    buckets = zip(snapshot.buffers, previous.buffers, snapshot.manifest.buckets, strict=True)
    encoded = [encode(new, old, bucket.element_bytes) for new, old, bucket in buckets]
    return Deltas(buckets=encoded, copied_s=copied - began, encode_s=time.perf_counter() - copied)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """One sender's groups of an epoch. Without a flow there is one group, which gets everything in the snapshot."""

    groups: Mapping[int, WeightGroup]
    """Groups by lane."""
    flow: Flow | None = None
    share: Share | None = None
    """Share of this sender, from which the flow is cut."""

    @property
    def parts(self) -> bool:
        """Whether something other than the buckets of the snapshot is sent."""
        if self.flow is None or self.share is None:
            return False
        return self.flow.manifest != self.share.manifest or len(self.groups) != 1

    @classmethod
    def form(
        cls, form: Callable[[str, int], WeightGroup], sender: int, flows: Flows | None, snapshot: Snapshot, world: int
    ) -> Lanes:
        """Form the groups one after another, in the order in which the receivers form them.

        Args:
            form: forms a group of this name and number of members.
            world: number of members of the single group without flows.

        Raises:
            RuntimeError: one did not form; the others are left.
        """
        if flows is None:
            return cls(groups={0: form(lane_name(sender, 0), world)})
        flow = flows.of[sender]
        groups: dict[int, WeightGroup] = {}
        try:
            for lane in sorted(set(flow.lanes)):
                groups[lane] = form(lane_name(sender, lane), len(flows.lanes[lane]) + 1)
        except RuntimeError:
            for group in groups.values():
                group.abort()
            raise
        shares = snapshot.shares or all_of(snapshot.manifest)
        return cls(groups=groups, flow=flow, share=shares.of[sender])

    def abort(self) -> None:
        for group in self.groups.values():
            group.abort()


def send(
    lanes: Lanes, snapshot: Snapshot, rooms: Rooms, through: Callable[[], None] = lambda: None
) -> tuple[int, list[str]]:
    """Send everything to all members; returns the bytes sent, and the fingerprints of the buckets.

    Args:
        rooms: buffers for pieces of a flow, which are not contiguous in the snapshot.
        through: called after each piece.

    Raises:
        RuntimeError: as `send_whole`.
    """
    flow = lanes.flow
    if flow is None or not lanes.parts:
        (group,) = lanes.groups.values()
        return send_whole(group, snapshot, through), snapshot.all_fingerprints()
    if not lanes.groups:
        return 0, []
    copied = _Copied(max(group.timeout_s for group in lanes.groups.values()), snapshot)
    with copied.blamed():
        prints = _send_flow(lanes, flow, copied, rooms, through)
    snapshot.filling.wait()
    return flow.manifest.nbytes, prints


def send_whole(group: WeightGroup, snapshot: Snapshot, through: Callable[[], None] = lambda: None) -> int:
    """Send all of the snapshot, each piece as soon as it has been copied; returns the bytes sent.

    Raises:
        RuntimeError: a member is gone or too slow; WeightsError if the copy took half of the time or all of it.
    """
    if snapshot.reading is not None:
        return _send_read(group, snapshot, snapshot.reading, through)
    copied = _Copied(group.timeout_s, snapshot)
    with copied.blamed():
        for index in passed(copied.whole(group)):
            through()
            if snapshot.on_device:
                snapshot.fingerprint(index)  # while the next one is being sent
    snapshot.filling.wait()
    return snapshot.manifest.nbytes


def _sizes(group: WeightGroup, bucket: Bucket) -> Iterator[int]:
    return map(len, group.pieces(torch.empty(bucket.nbytes, dtype=torch.uint8, device="meta")))


def _send_read(group: WeightGroup, snapshot: Snapshot, reading: Reading, through: Callable[[], None]) -> int:
    """Send without a snapshot: the next piece is cast and hashed while one is being sent."""
    buckets = snapshot.manifest.buckets
    prints = [Fingerprint() for _ in buckets]

    def flow() -> Iterator[tuple[None, WeightGroup, torch.Tensor]]:
        number = 0
        for bucket, fingerprint in zip(buckets, prints, strict=True):
            for piece in reading.pieces(bucket, _sizes(group, bucket), number):
                fingerprint.update(piece)
                number += 1
                yield None, group, piece

    reading.rooms.reserve(max((size for bucket in buckets for size in _sizes(group, bucket)), default=0))
    for _ in passed(flow()):
        through()
    snapshot.fingerprints[:] = [fingerprint.hex() for fingerprint in prints]
    return snapshot.manifest.nbytes


def _send_flow(lanes: Lanes, flow: Flow, copied: _Copied, rooms: Rooms, through: Callable[[], None]) -> list[str]:
    """Send parts of the tensors, each to its lane; the next piece is packed and hashed while one is being sent."""
    assert lanes.share is not None
    tensors = copied.parts(flow, lanes.share)
    prints = [Fingerprint() for _ in flow.lanes]
    ways = [(bucket, lanes.groups[lane]) for bucket, lane in zip(flow.manifest.buckets, flow.lanes, strict=True)]

    def pieces() -> Iterator[tuple[None, WeightGroup, torch.Tensor]]:
        number = 0
        for (bucket, group), fingerprint in zip(ways, prints, strict=True):
            start = 0
            for size in _sizes(group, bucket):
                if start % STRETCH == 0:
                    copied.stood_s = 0.0
                piece = copied.packed(bucket, start, rooms.take(number, size), tensors)
                fingerprint.update(piece)
                yield None, group, piece
                start, number = start + size, number + 1

    rooms.reserve(max((size for bucket, group in ways for size in _sizes(group, bucket)), default=0))
    for _ in passed(pieces()):
        through()
    return [fingerprint.hex() for fingerprint in prints]


class _Copied:
    """A snapshot, as far as it is final.

    Raises:
        WeightsError: within one stretch the copy stood still for as long as the members wait for all of it.
    """

    def __init__(self, timeout_s: float, snapshot: Snapshot) -> None:
        self.timeout_s, self._snapshot = timeout_s, snapshot
        self._ends: dict[str, int] = {}
        """Number of final bytes after which each part of a flow is final."""
        self.stood_s = 0.0
        """Seconds of the present stretch during which there was nothing to send."""

    def whole(self, group: WeightGroup) -> Iterator[tuple[int, WeightGroup, torch.Tensor]]:
        """Yield bucket index, group and piece, each once it is final."""
        done = 0
        for index, buffer in enumerate(self._snapshot.buffers):
            for stretch in buffer.split(STRETCH):
                self.stood_s = 0.0
                for piece in group.pieces(stretch):
                    done += len(piece)
                    self._wait(done)
                    yield index, group, piece

    def parts(self, flow: Flow, share: Share) -> dict[str, torch.Tensor]:
        """The parts of the tensors, by entry of the flow."""
        snapshot = self._snapshot
        tensors, before, ends = {}, 0, {}
        for bucket in snapshot.manifest.buckets:
            ends |= {entry.name: before + entry.offset + entry.nbytes for entry in bucket.entries}
            before += bucket.nbytes
        held = snapshot.reading.tensors if snapshot.reading else snapshot.manifest.views(snapshot.buffers)
        for entry, (name, box) in flow.parts.items():
            tensors[entry] = held[name][slices(within(share.boxes[name], box))]
            self._ends[entry] = ends[name]
        return tensors

    def packed(
        self, bucket: Bucket, start: int, room: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Set `room` to the bytes of the flow's bucket from `start` on, once their sources are final."""
        snapshot, stop = self._snapshot, start + len(room)
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
        self._snapshot.filling.wait(reached)
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


def send_deltas(group: WeightGroup, deltas: Sequence[Encoded]) -> int:
    """Send one payload after another; returns the bytes sent."""
    for _ in passed((None, group, piece) for delta in deltas for piece in group.pieces(delta.payload)):
        pass
    return sum(len(delta.payload) for delta in deltas)
