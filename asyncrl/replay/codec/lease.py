"""Packs and unpacks the trajectories sent to a rank: tables, and the frames they refer to.

    table row   [group, first trajectory, how many, frame, offset, size, first own frame, how many]
    extras row  the same, for the extras of these trajectories
    text row    [group, frame]                                                              whole groups only

A row describes consecutive trajectories of one group: their part of a joined frame, which is the frame as received if
they are the whole group. Small parts are joined in frame 0; large arrays keep their own frames.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from asyncrl.errors import WireError
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame, columns_of, decode
from asyncrl.replay.codec.extras import ALIGNED, Extras, decode_extras, row_of, side_frames_of
from asyncrl.replay.codec.group import StoredGroup, group_of, join_texts
from asyncrl.replay.protocol import Lease
from asyncrl.types import StepPlan, Trajectory, TrajectoryGroup, TrajectoryHeader

SAMPLE_GROUPS = 4
"""Number of whole groups with texts that rank 0 gets with a lease, for `samples.jsonl`."""
SEPARATE = 64 << 10
"""Size in bytes from which consecutive trajectories get a frame instead of being copied together with others."""
Place = tuple[int, int]
"""(group, trajectory) positions in a plan."""


def pack_places(
    stored: Mapping[int, Sequence[StoredGroup]], places: Iterable[Place], sampled: Sequence[int]
) -> tuple[list[Any], list[Frame]]:
    """Return `([table, extras, text rows], frames)` for the trajectories at `places`, and for all of the `sampled`
    groups, with texts and without extras, which nobody uses.

    Args:
        stored: by group, what was inserted of it, in the order of its trajectories: the whole of it, or its members one
            by one (`replay.admission=sample`). Only texts of members are copied.
    """
    load, everything = _Load(), set(places)
    with_extras = any(part.side for parts in stored.values() for part in parts)
    trained = list(everything) if with_extras else []
    for group in sampled:
        everything.update((group, place) for place in range(sum(len(part.columns.rows) for part in stored[group])))
    table = [[*row, *load.add(*part.columns.part(first, row[2]))] for row, part, first in _runs(everything, stored)]
    extras = [
        [*row, *load.add(*part.side.part(first, row[2]))] for row, part, first in _runs(trained, stored) if part.side
    ]
    frames = [b"".join(load.small), *load.frames]
    texts = [[group, len(frames) + place] for place, group in enumerate(sampled)]
    whole = [join_texts([part.texts for part in stored[group]]) for group in sampled]
    return [table, extras, texts], [*frames, *whole]


@dataclass(slots=True)
class _Load:
    """The frames filled so far."""

    small: list[Frame] = field(default_factory=list)
    """Pieces of frame 0."""
    small_bytes: int = 0
    frames: list[Frame] = field(default_factory=list)
    """The frames from frame 1 on."""

    def add(self, pieces: list[Frame], own: Sequence[Frame]) -> list[int]:
        """Returns `[frame, offset, size, first own frame, how many]`."""
        size = sum(map(len, pieces))
        if size < SEPARATE:
            gap = -self.small_bytes % ALIGNED
            frame, offset = 0, self.small_bytes + gap
            self.small += [bytes(gap), *pieces] if gap else pieces
            self.small_bytes = offset + size
        else:
            frame, offset = 1 + len(self.frames), 0
            self.frames.append(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        first = 1 + len(self.frames)
        self.frames += own
        return [frame, offset, size, first, len(own)]


def _runs(
    places: Iterable[Place], stored: Mapping[int, Sequence[StoredGroup]]
) -> list[tuple[list[int], StoredGroup, int]]:
    """Return runs of consecutive trajectories in one part: `[group, first trajectory, how many]`, the part, and the
    position of the first trajectory in it."""
    runs: list[tuple[list[int], StoredGroup, int]] = []
    for group, of_group in itertools.groupby(sorted(places), key=itemgetter(0)):
        part = begin = end = 0
        for _, position in of_group:
            if position < end and sum(runs[-1][0][1:]) == position:
                runs[-1][0][2] += 1
                continue
            while position >= end:
                part, begin, end = part + 1, end, end + len(stored[group][part].columns.rows)
            runs.append(([group, position, 1], stored[group][part - 1], position - begin))
    return runs


class Unpacking:
    """Assembles one rank's part of a plan from one or more parcels."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self._found: dict[Place, Trajectory] = {}
        self._extras: dict[Place, Extras] = {}
        self._texts: dict[int, Frame] = {}

    def open(self, parcel: Any, frames: Sequence[Frame]) -> None:
        """Decode a parcel, checking each trajectory against the header by which it was judged.

        Raises:
            WireError: a trajectory and its header do not agree.
        """
        views = [memoryview(frame) for frame in frames]
        table, extras, texts = wire.sequence(parcel, "parcel", 3)
        for row in wire.sequence(table, "table", limit=wire.MAX_TOKENS):
            group, first, facts, joined, own = self._cut(row, views)
            columns = columns_of(facts, joined, own)
            for position, trajectory in enumerate(decode(facts, columns), first):
                self._found[group, position] = trajectory
        for row in wire.sequence(extras, "extras table", limit=wire.MAX_TOKENS):
            group, first, facts, joined, own = self._cut(row, views)
            side = side_frames_of(tuple(map(row_of, facts)), [joined, *own])
            for position, found in enumerate(decode_extras(facts, side), first):
                self._extras[group, position] = found
        for row in wire.sequence(texts, "texts"):
            group, place = wire.sequence(row, "text row", 2)
            wire.integer(group, "group", 0, len(self._plan.groups) - 1)
            wire.integer(place, "text frame", 0, len(views) - 1)
            self._texts[group] = views[place]

    def _cut(
        self, row: Any, views: Sequence[memoryview]
    ) -> tuple[int, int, tuple[TrajectoryHeader, ...], memoryview, Sequence[memoryview]]:
        """Return `(group, first trajectory, headers, joined frame, own frames)` of the trajectories of one row."""
        group, first, count, frame, offset, size, own, owned = wire.sequence(row, "table row", 8)
        wire.integer(group, "group", 0, len(self._plan.groups) - 1)
        headers = self._plan.groups[group].trajectories
        wire.integer(first, "trajectory", 0, len(headers) - 1)
        wire.integer(count, "trajectories", 1, len(headers) - first)
        wire.integer(frame, "frame", 0, len(views) - 1)
        wire.integer(offset, "offset", 0, len(views[frame]))
        wire.integer(size, "size", 0, len(views[frame]) - offset)
        wire.integer(own, "first frame", 0, len(views))
        wire.integer(owned, "frames", 0, len(views) - own)
        return (
            group,
            first,
            headers[first : first + count],
            views[frame][offset : offset + size],
            views[own : own + owned],
        )

    def lease(self, rank: int) -> Lease:
        """Raises WireError if a trajectory of this rank, its extras, or a trajectory of a sampled group is missing."""
        plan = self._plan
        wire.integer(rank, "rank", 0, len(plan.shards) - 1)
        found, extras, places = self._found, self._extras, plan.shards[rank]
        missing = [place for place in places if place not in found]
        missing += [(g, t) for g, t in places if plan.groups[g].trajectories[t].extras and (g, t) not in extras]
        if missing:
            raise WireError(f"the lease of step {plan.step} lacks the trajectories {missing[:5]} of rank {rank}")
        samples = tuple(self._sample(group) for group in sorted(self._texts))
        trajectories = {place: found[place] for place in places}
        for place in places if extras else ():
            trajectories[place] = replace(found[place], extras=extras.get(place, {}))
        return Lease(plan=plan, trajectories=trajectories, samples=samples)

    def _sample(self, group: int) -> TrajectoryGroup:
        header = self._plan.groups[group]
        places = [(group, position) for position in range(len(header.trajectories))]
        if any(place not in self._found for place in places):
            raise WireError(f"group {header.group_id} arrived without all its trajectories")
        return group_of(header, self._texts[group], [self._found[place] for place in places])
