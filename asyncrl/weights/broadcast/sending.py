"""Sends one version as rank 0 of a group: buckets as they are copied, or deltas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.boxes import within
from asyncrl.weights.broadcast.group import STRETCH, WeightGroup, passed, piece_sizes
from asyncrl.weights.delta import Encoded, encode
from asyncrl.weights.fingerprint import Fingerprint
from asyncrl.weights.flows import Flow, Flows, all_of, lane_name
from asyncrl.weights.manifest import Bucket
from asyncrl.weights.publishing.reading import Rooms, pack
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
    """One sender's groups of an epoch, and what it sends to them."""

    groups: Mapping[int, WeightGroup]
    flow: Flow
    share: Share
    """Share of this sender, from which the flow is cut."""

    @property
    def parts(self) -> bool:
        """Whether something other than the buckets of the snapshot is sent."""
        return self.flow.manifest != self.share.manifest or len(self.groups) != 1

    @classmethod
    def form(
        cls, form: Callable[[str, int], WeightGroup], sender: int, flows: Flows | None, snapshot: Snapshot, world: int
    ) -> Lanes:
        """Form the groups one after another, in the order in which the receivers form them.

        Args:
            form: forms a group of this name and number of members.
            flows: None for one group, which gets everything in the snapshot.
            world: number of members of that group.

        Raises:
            RuntimeError: one did not form; the others are left.
        """
        share = (snapshot.shares or all_of(snapshot.manifest)).of[sender]
        flow, wide = Flow.of(share), {0: world}
        if flows is not None:
            flow = flows.of[sender]
            wide = {lane: len(flows.lanes[lane]) + 1 for lane in sorted(set(flow.lanes))}
        groups: dict[int, WeightGroup] = {}
        try:
            for lane, members in wide.items():
                groups[lane] = form(lane_name(sender, lane), members)
        except RuntimeError:
            for group in groups.values():
                group.abort()
            raise
        return cls(groups=groups, flow=flow, share=share)

    def abort(self) -> None:
        for group in self.groups.values():
            group.abort()


def send(
    lanes: Lanes, snapshot: Snapshot, rooms: Rooms, through: Callable[[], None] = lambda: None
) -> tuple[int, list[str]]:
    """Send everything to all members, each piece as soon as it has been copied; returns the bytes sent, and the
    fingerprints of the buckets.

    Args:
        rooms: buffers for pieces that are not contiguous in the snapshot.
        through: called after each piece.

    Raises:
        RuntimeError: a member is gone or too slow; WeightsError if the copy took half of the time or all of it.
    """
    if not lanes.groups:
        return 0, []
    copied = _Copied(max(group.timeout_s for group in lanes.groups.values()), snapshot)
    packed = lanes.parts or snapshot.reading is not None
    with copied.blamed():
        prints = (_send_flow if packed else _send_buckets)(lanes, copied, rooms, through)
    snapshot.filling.wait()
    return lanes.flow.manifest.nbytes, prints if packed else snapshot.all_fingerprints()


def _send_buckets(lanes: Lanes, copied: _Copied, _: Rooms, through: Callable[[], None]) -> list[str]:
    """Send the buckets of the snapshot as they are. Those on a device are hashed meanwhile; others when copied."""
    (group,) = lanes.groups.values()
    for index in passed(copied.whole(group)):
        through()
        if copied.snapshot.on_device:
            copied.snapshot.fingerprint(index)  # while the next one is being sent
    return []


def _send_flow(lanes: Lanes, copied: _Copied, rooms: Rooms, through: Callable[[], None]) -> list[str]:
    """Send parts of the tensors, each to its lane; the next piece is packed and hashed while one is being sent."""
    flow = lanes.flow
    tensors = copied.parts(flow, lanes.share)
    prints = [Fingerprint() for _ in flow.lanes]
    ways = [(bucket, lanes.groups[lane]) for bucket, lane in zip(flow.manifest.buckets, flow.lanes, strict=True)]

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
        through()
    return [fingerprint.hex() for fingerprint in prints]


class _Copied:
    """A snapshot, as far as it is final.

    Raises:
        WeightsError: within one stretch the copy stood still for as long as the members wait for all of it.
    """

    def __init__(self, timeout_s: float, snapshot: Snapshot) -> None:
        self.timeout_s, self.snapshot = timeout_s, snapshot
        self._ends: dict[str, int] = {}
        """Number of final bytes after which each part of a flow is final."""
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

    def parts(self, flow: Flow, share: Share) -> dict[str, torch.Tensor]:
        """The parts of the tensors, by entry of the flow."""
        snapshot = self.snapshot
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


def send_deltas(group: WeightGroup, deltas: Sequence[Encoded]) -> int:
    """Send one payload after another; returns the bytes sent."""
    for _ in passed((None, group, piece) for delta in deltas for piece in group.pieces(delta.payload)):
        pass
    return sum(len(delta.payload) for delta in deltas)
