"""Computes what each sender sends in one epoch, and to whom: its share, cut along the parts that the receivers want.

    lane     receivers that want the same parts; each sender has a process group with those of each lane
    flow     the buckets of one sender in their order, each of them for one lane

Every element is in one bucket at most, so all senders together send no more than the size of the model. Senders and
receivers both process the buckets of their lanes in the order of the flow, so no two of them wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import WeightsError
from asyncrl.weights.boxes import Box, chopped, contains, intersection, overlap, regions, sizes, volume, whole
from asyncrl.weights.manifest import Bucket, Entry, Manifest, build_manifest
from asyncrl.weights.shares import Share, Shares
from asyncrl.weights.sliced import Wanted

MOST_LANES = 32
"""Limit on the groups that a sender forms; with more kinds of receivers, all of them get the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What one sender sends."""

    manifest: Manifest
    """Manifest of parts of tensors, each under a name of its own."""
    parts: Mapping[str, tuple[str, Box]]
    """Maps that name to the tensor and the part of it."""
    lanes: tuple[int, ...]

    @classmethod
    def of(cls, share: Share) -> Flow:
        """All of a share, for a single lane."""
        parts = {name: (name, box) for name, box in share.boxes.items()}
        return cls(manifest=share.manifest, parts=parts, lanes=(0,) * len(share.manifest.buckets))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flows:
    whole: Manifest
    """Manifest of the model."""
    lanes: tuple[tuple[int, ...], ...]
    """Ranks of the receivers of each lane, ascending."""
    of: tuple[Flow, ...]

    def received(self, rank: int) -> dict[str, list[Box]]:
        """The parts that a receiver gets, by tensor."""
        found: dict[str, list[Box]] = {entry.name: [] for entry in self.whole.entries}
        for flow in self.of:
            for bucket, lane in zip(flow.manifest.buckets, flow.lanes, strict=True):
                for entry in bucket.entries if rank in self.lanes[lane] else ():
                    name, box = flow.parts[entry.name]
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
        """msgpack-able; read back by `from_wire`. Tensors are identified by their index in the whole manifest."""
        numbers = {entry.name: number for number, entry in enumerate(self.whole.entries)}

        def row(flow: Flow, entry: Entry) -> list[int]:
            name, box = flow.parts[entry.name]
            return [numbers[name], *(end for ends in box for end in ends)]

        flows = [
            [
                [lane, [row(flow, entry) for entry in bucket.entries]]
                for bucket, lane in zip(flow.manifest.buckets, flow.lanes, strict=True)
            ]
            for flow in self.of
        ]
        return [[list(lane) for lane in self.lanes], flows]

    @classmethod
    def from_wire(cls, wire: Sequence[Any], whole_manifest: Manifest) -> Flows:
        """Raises WeightsError unless the lanes exist and the parts lie within their tensors."""
        lanes = tuple(tuple(map(int, lane)) for lane in wire[0])
        if not all(lane and lane[0] > 0 and list(lane) == sorted(set(lane)) for lane in lanes):
            raise WeightsError(f"lanes of receivers {lanes} are not ranks in order")
        known = whole_manifest.entries
        flows = []
        for buckets in wire[1]:
            rows: list[tuple[int, list[tuple[Entry, Box]]]] = []
            for lane, parts in buckets:
                if not 0 <= int(lane) < len(lanes):
                    raise WeightsError(f"a sender's bucket is for lane {lane} of {len(lanes)}")
                rows.append((int(lane), [_part(known, number, ends) for number, *ends in parts]))
            flows.append(_flow(rows))
        return cls(whole=whole_manifest, lanes=lanes, of=tuple(flows))


def _part(known: Sequence[Entry], number: Any, ends: Sequence[Any]) -> tuple[Entry, Box]:
    if not 0 <= int(number) < len(known):
        raise WeightsError(f"a sender's share names tensor {number} of {len(known)}")
    entry, box = known[number], tuple(zip(map(int, ends[::2]), map(int, ends[1::2]), strict=True))
    if len(box) != len(entry.shape) or any(not 0 <= a < b <= n for (a, b), n in zip(box, entry.shape, strict=True)):
        raise WeightsError(f"a sender's share has box {box} of {entry.name}, which is {entry.shape}")
    return entry, box


def lane_name(sender: int, lane: int) -> str:
    """Name that tells this group from the others of an epoch."""
    return f"{sender}.{lane}"


def all_of(manifest: Manifest) -> Shares:
    """Shares of a single sender that has the whole model."""
    share = Share(manifest=manifest, boxes={entry.name: whole(entry.shape) for entry in manifest.entries})
    return Shares(whole=manifest, of=(share,))


def flows_of(manifest: Manifest, shares: Shares | None, wanted: Sequence[Wanted], cap_bytes: int) -> Flows | None:
    """See `cut`; None if one sender sends the whole model to all receivers. `shares`: those of several senders, or
    None."""
    if shares is None and not any(wanted):
        return None
    return cut(shares or all_of(manifest), wanted, cap_bytes)


def cut(shares: Shares, wanted: Sequence[Wanted], cap_bytes: int) -> Flows:
    """Assign every element that a receiver wants to that receiver exactly once.

    Args:
        wanted: by receiver; its rank in the group is its index here plus one.
        cap_bytes: limit on a bucket that is for some of the receivers only.
    """
    alike: dict[frozenset[tuple[str, tuple[Box, ...]]], list[int]] = {}
    for rank, each in enumerate(wanted, 1):
        alike.setdefault(frozenset(each.items()), []).append(rank)
    kinds = [(dict(each), ranks) for each, ranks in alike.items()]
    lanes: dict[tuple[int, ...], int] = {}
    flows = tuple(_flow(_cut_share(share, kinds, cap_bytes, lanes)) for share in shares.of)
    if len(lanes) > MOST_LANES:
        return cut(shares, [{}] * len(wanted), cap_bytes)
    return Flows(whole=shares.whole, lanes=tuple(lanes), of=flows)


def _cut_share(
    share: Share, kinds: Sequence[tuple[Wanted, Sequence[int]]], cap_bytes: int, lanes: dict[tuple[int, ...], int]
) -> list[tuple[int, list[tuple[Entry, Box]]]]:
    """Return (lane, parts) of each bucket. The buckets cut from one bucket of the share alternate between the lanes, so
    that no lane waits for more than one bucket of the share.

    Args:
        kinds: the distinct wants, and the ranks that have each.
    """
    rows = []
    for bucket in share.manifest.buckets:
        by_lane: dict[int, list[tuple[Entry, Box]]] = {}
        for entry in bucket.entries:
            held = share.boxes[entry.name]
            tensor = Entry(name=entry.name, shape=sizes(held), dtype=entry.dtype, offset=0, nbytes=0)
            needed = [[intersection(box, held) for box in each.get(entry.name, (held,))] for each, _ in kinds]
            for box, places in regions(tensor.shape, needed):
                ranks = tuple(sorted(rank for place in places for rank in kinds[place][1]))
                lane = lanes.setdefault(ranks, len(lanes))
                by_lane.setdefault(lane, []).append((tensor, box))
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


def _flow(rows: Sequence[tuple[int, Sequence[tuple[Entry, Box]]]]) -> Flow:
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
    return Flow(manifest=Manifest(buckets=tuple(buckets)), parts=parts, lanes=tuple(lane for lane, _ in rows))
