"""Computes what the learner sends in one epoch, and to whom: the model, cut along the parts that the receivers want.

    lane     receivers that want the same parts; the sender has a process group with those of each lane
    bucket   parts of tensors for one lane, in the order of the model

Every element is in one bucket at most, so the model is sent at most once. Sender and receivers process the buckets of
their lanes in the same order, so no two of them wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import WeightsError
from asyncrl.weights.boxes import Box, chopped, contains, overlap, regions, sizes, volume, whole
from asyncrl.weights.manifest import Bucket, Entry, Manifest, build_manifest
from asyncrl.weights.sliced import Wanted

MAX_LANES = 32
"""Limit on the groups that are formed; with more kinds of receivers, all of them get the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPlan:
    """What is sent in an epoch, in order."""

    whole: Manifest
    """Manifest of the model."""
    lanes: tuple[tuple[int, ...], ...]
    """Ranks of the receivers of each lane, ascending."""
    manifest: Manifest
    """Manifest of parts of tensors, each under a name of its own."""
    parts: Mapping[str, tuple[str, Box]]
    """Maps that name to the tensor and the part of it."""
    bucket_lanes: tuple[int, ...]
    """The lane of each bucket of `manifest`."""

    @classmethod
    def everything(cls, manifest: Manifest, world: int) -> SendPlan:
        """The model as it is, for all of the ranks 1.. of `world`."""
        return cls(
            whole=manifest,
            lanes=(tuple(range(1, world)),),
            manifest=manifest,
            parts={entry.name: (entry.name, whole(entry.shape)) for entry in manifest.entries},
            bucket_lanes=(0,) * len(manifest.buckets),
        )

    @classmethod
    def of(cls, manifest: Manifest, wanted: Sequence[Wanted], cap_bytes: int) -> SendPlan:
        """Assign every element that a receiver wants to that receiver exactly once.

        Args:
            wanted: by receiver; its rank in the group is its index here plus one.
            cap_bytes: limit on a bucket that is for some of the receivers only.
        """
        if not any(wanted):
            return cls.everything(manifest, len(wanted) + 1)
        alike: dict[frozenset[tuple[str, tuple[Box, ...]]], list[int]] = {}
        for rank, want in enumerate(wanted, 1):
            alike.setdefault(frozenset(want.items()), []).append(rank)
        kinds = [(dict(want), ranks) for want, ranks in alike.items()]
        lanes: dict[tuple[int, ...], int] = {}
        rows = _cut(manifest, kinds, cap_bytes, lanes)
        if len(lanes) > MAX_LANES:
            return cls.everything(manifest, len(wanted) + 1)
        return cls._of_rows(manifest, tuple(lanes), rows)

    @property
    def cuts(self) -> bool:
        """Whether something other than the model's own buckets is sent."""
        return self.manifest != self.whole

    def received(self, rank: int) -> dict[str, list[Box]]:
        """The parts that a receiver gets, by tensor."""
        found: dict[str, list[Box]] = {entry.name: [] for entry in self.whole.entries}
        for bucket, lane in zip(self.manifest.buckets, self.bucket_lanes, strict=True):
            for entry in bucket.entries if rank in self.lanes[lane] else ():
                name, box = self.parts[entry.name]
                found[name].append(box)
        return found

    def brings(self, rank: int, wanted: Wanted) -> bool:
        """Whether a receiver gets what it wants exactly once, and nothing else."""
        received = self.received(rank)
        for entry in self.whole.entries:
            want, parts = wanted.get(entry.name, (whole(entry.shape),)), received[entry.name]
            inside = all(any(contains(box, part) for box in want) for part in parts)
            if not inside or sum(map(volume, parts)) != sum(map(volume, want)) or overlap(parts):
                return False
        return True

    def to_wire(self) -> list[Any]:
        """msgpack-able; read back by `from_wire`. Tensors are identified by their index in the whole manifest. Empty if
        all receivers get the model as it is."""
        if not self.cuts:
            return []
        numbers = {entry.name: number for number, entry in enumerate(self.whole.entries)}

        def row(entry: Entry) -> list[int]:
            name, box = self.parts[entry.name]
            return [numbers[name], *(end for ends in box for end in ends)]

        buckets = [
            [lane, [row(entry) for entry in bucket.entries]]
            for bucket, lane in zip(self.manifest.buckets, self.bucket_lanes, strict=True)
        ]
        return [[list(lane) for lane in self.lanes], buckets]

    @classmethod
    def from_wire(cls, wire: Sequence[Any], manifest: Manifest, world: int) -> SendPlan:
        """Raises WeightsError unless the lanes exist and the parts lie within their tensors."""
        if not wire:
            return cls.everything(manifest, world)
        lanes = tuple(tuple(map(int, lane)) for lane in wire[0])
        if not all(lane and lane[0] > 0 and list(lane) == sorted(set(lane)) for lane in lanes):
            raise WeightsError(f"lanes of receivers {lanes} are not ranks in order")
        known = manifest.entries
        rows: list[tuple[int, list[tuple[Entry, Box]]]] = []
        for lane, parts in wire[1]:
            if not 0 <= int(lane) < len(lanes):
                raise WeightsError(f"a bucket is for lane {lane} of {len(lanes)}")
            rows.append((int(lane), [_part(known, number, ends) for number, *ends in parts]))
        return cls._of_rows(manifest, lanes, rows)

    @classmethod
    def _of_rows(
        cls,
        manifest: Manifest,
        lanes: tuple[tuple[int, ...], ...],
        rows: Sequence[tuple[int, Sequence[tuple[Entry, Box]]]],
    ) -> SendPlan:
        """`rows`: lane and parts of each bucket, in order."""
        parts: dict[str, tuple[str, Box]] = {}
        count: dict[str, int] = {}
        buckets: list[Bucket] = []
        for _, row in rows:
            named = []
            for entry, box in row:
                number = count[entry.name] = count.get(entry.name, -1) + 1
                name = f"{entry.name}#{number}" if number else entry.name
                parts[name] = entry.name, box
                named.append((name, sizes(box), entry.dtype))
            buckets += build_manifest(named, 1 << 62).buckets
        return cls(
            whole=manifest,
            lanes=lanes,
            manifest=Manifest(buckets=tuple(buckets)),
            parts=parts,
            bucket_lanes=tuple(lane for lane, _ in rows),
        )


def _part(known: Sequence[Entry], number: Any, ends: Sequence[Any]) -> tuple[Entry, Box]:
    if not 0 <= int(number) < len(known):
        raise WeightsError(f"a part of tensor {number} of {len(known)} was announced")
    entry, box = known[number], tuple(zip(map(int, ends[::2]), map(int, ends[1::2]), strict=True))
    if len(box) != len(entry.shape) or any(not 0 <= a < b <= n for (a, b), n in zip(box, entry.shape, strict=True)):
        raise WeightsError(f"a part of {entry.name}, which is {entry.shape}, has box {box}")
    return entry, box


def _cut(
    manifest: Manifest,
    kinds: Sequence[tuple[Wanted, Sequence[int]]],
    cap_bytes: int,
    lanes: dict[tuple[int, ...], int],
) -> list[tuple[int, list[tuple[Entry, Box]]]]:
    """Return (lane, parts) of each bucket. The buckets cut from one bucket of the model alternate between the lanes, so
    that no lane waits for more than one bucket of the model.

    Args:
        kinds: the distinct wants, and the ranks that have each.
    """
    rows: list[tuple[int, list[tuple[Entry, Box]]]] = []
    for bucket in manifest.buckets:
        by_lane: dict[int, list[tuple[Entry, Box]]] = {}
        for entry in bucket.entries:
            needed = [want.get(entry.name, (whole(entry.shape),)) for want, _ in kinds]
            for box, indices in regions(entry.shape, needed):
                ranks = tuple(sorted(rank for index in indices for rank in kinds[index][1]))
                lane = lanes.setdefault(ranks, len(lanes))
                by_lane.setdefault(lane, []).append((entry, box))
        if len(by_lane) == 1:
            rows += by_lane.items()
            continue
        packed = {lane: _packed(parts, cap_bytes) for lane, parts in by_lane.items()}
        for turn in range(max(map(len, packed.values()), default=0)):
            rows += [(lane, buckets[turn]) for lane, buckets in packed.items() if turn < len(buckets)]
    return rows


def _packed(parts: Sequence[tuple[Entry, Box]], cap_bytes: int) -> list[list[tuple[Entry, Box]]]:
    """Divide into buckets of at most `cap_bytes`, in order."""
    buckets: list[list[tuple[Entry, Box]]] = []
    size = cap_bytes
    for entry, box in parts:
        for part in chopped(box, cap_bytes // entry.dtype.itemsize):
            nbytes = volume(part) * entry.dtype.itemsize
            if size + nbytes > cap_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append((entry, part))
            size += nbytes
    return buckets
