"""Trajectories on their way to a rank, both ends: a table, and frames with what it points to.

    table row   [group, first trajectory, how many, frame, offset, size, first frame of their own, how many]
    text row    [group, frame]                                                              whole groups only

A row is about neighbours of one group: their columns in one frame, which is the one received where they are the whole
group. Small ones are joined in frame 0, large arrays keep their own frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncrl.errors import WireError
from asyncrl.replay import wire
from asyncrl.replay.base import Lease
from asyncrl.replay.columns import Frame, columns_of, decode
from asyncrl.replay.payload import StoredGroup, decode_texts
from asyncrl.types import StepPlan, Trajectory, TrajectoryGroup

SEPARATE = 64 << 10
"""Bytes from which neighbours get a frame instead of being joined with others (a copy)."""


def pack_places(
    stored: Mapping[int, StoredGroup], places: Iterable[tuple[int, int]], sampled: Sequence[int]
) -> tuple[list[Any], list[Any], list[Frame]]:
    """`(table, text rows, frames)` for the `(group, trajectory)` places, and the texts of the `sampled` groups. Groups
    go by the numbers that `stored` has them under."""
    small: list[Frame] = []
    small_bytes = 0
    frames: list[Frame] = [b""]
    table = []
    for group, first, count in _neighbours(places):
        pieces, own = stored[group].columns.part(first, count)
        size = sum(map(len, pieces))
        if size < SEPARATE:
            frame, offset = 0, small_bytes
            small += pieces
            small_bytes += size
        else:
            frame, offset = len(frames), 0
            frames.append(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        table.append([group, first, count, frame, offset, size, len(frames), len(own)])
        frames += own
    frames[0] = b"".join(small)
    texts = [[group, len(frames) + place] for place, group in enumerate(sampled)]
    frames.extend(stored[group].texts for group in sampled)
    return table, texts, frames


def _neighbours(places: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Runs `[group, first trajectory, how many]`."""
    runs: list[list[int]] = []
    for group, position in sorted(places):
        if runs and runs[-1][0] == group and sum(runs[-1][1:]) == position:
            runs[-1][2] += 1
        else:
            runs.append([group, position, 1])
    return runs


class Unpacking:
    """One rank's part of a plan, put together from one parcel or several."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self._found: dict[tuple[int, int], Trajectory] = {}
        self._texts: dict[int, tuple[str, tuple[str, ...], float, float]] = {}

    def open(self, table: Any, texts: Any, frames: Sequence[Frame]) -> None:
        """Decode a parcel, each trajectory checked against the header it was judged by.

        Raises:
            WireError: something does not agree.
        """
        plan, views = self._plan, [memoryview(frame) for frame in frames]
        for row in wire.sequence(table, "table", limit=wire.MAX_TOKENS):
            group, first, count, frame, offset, size, own, owned = wire.sequence(row, "table row", 8)
            wire.integer(group, "group", 0, len(plan.groups) - 1)
            headers = plan.groups[group].trajectories
            wire.integer(first, "trajectory", 0, len(headers) - 1)
            wire.integer(count, "trajectories", 1, len(headers) - first)
            wire.integer(frame, "frame", 0, len(views) - 1)
            wire.integer(offset, "offset", 0, len(views[frame]))
            wire.integer(size, "size", 0, len(views[frame]) - offset)
            wire.integer(own, "first frame", 0, len(views))
            wire.integer(owned, "frames", 0, len(views) - own)
            neighbours = headers[first : first + count]
            columns = columns_of(neighbours, views[frame][offset : offset + size], views[own : own + owned])
            for position, trajectory in enumerate(decode(neighbours, columns), first):
                self._found[group, position] = trajectory
        for row in wire.sequence(texts, "texts"):
            group, place = wire.sequence(row, "text row", 2)
            wire.integer(group, "group", 0, len(plan.groups) - 1)
            wire.integer(place, "text frame", 0, len(views) - 1)
            self._texts[group] = decode_texts(views[place])

    def lease(self, rank: int) -> Lease:
        """Raises WireError when a trajectory of this rank, or of a sampled group, is missing."""
        plan, found = self._plan, self._found
        wire.integer(rank, "rank", 0, len(plan.shards) - 1)
        missing = [place for place in plan.shards[rank] if place not in found]
        if missing:
            raise WireError(f"the lease of step {plan.step} lacks the trajectories {missing[:5]} of rank {rank}")
        samples = tuple(self._sample(group) for group in sorted(self._texts))
        return Lease(plan=plan, trajectories={place: found[place] for place in plan.shards[rank]}, samples=samples)

    def _sample(self, group: int) -> TrajectoryGroup:
        header = self._plan.groups[group]
        places = [(group, position) for position in range(len(header.trajectories))]
        if any(place not in self._found for place in places):
            raise WireError(f"sample group {header.group_id} came without all its trajectories")
        prompt_text, completion_texts, started_at, finished_at = self._texts[group]
        return TrajectoryGroup(
            group_id=header.group_id,
            prompt_index=header.prompt_index,
            attempt=header.attempt,
            worker=header.worker,
            trajectories=tuple(self._found[place] for place in places),
            prompt_text=prompt_text,
            completion_texts=completion_texts,
            started_at=started_at,
            finished_at=finished_at,
        )
