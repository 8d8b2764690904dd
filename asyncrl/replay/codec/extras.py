"""The bytes of `Trajectory.extras` in frames of their own. Nobody on the way looks into them, but for `ref_logprobs`.

    joined frame   a block per trajectory: its arrays below 256 KiB, one after the other, each from a multiple of 8 on
    own frames     blocks and arrays of 256 KiB or more: trajectory by trajectory, its block first

Only groups with extras have any of them. As with columns, what is where follows from the headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WireError
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import LARGE_ARRAY, Frame, own_sizes
from asyncrl.types import ExtraHeader, Trajectory, TrajectoryHeader

Extras = dict[str, NDArray[Any]]
ALIGNED = 8
"""Bytes of the largest item: a view that begins elsewhere would have to be copied by whoever calculates with it."""


def describe_extras(extras: Mapping[str, Any]) -> tuple[ExtraHeader, ...]:
    """Their headers, checked as the server will. Raises WireError."""
    for name, array in extras.items():
        if not isinstance(array, np.ndarray):
            raise WireError(f"extra {wire.short(name)} must be a numpy array, not {type(array).__name__}")
    rows = [[name, _as_sent(array).str, list(array.shape)] for name, array in extras.items()]
    return wire.decode_extra_headers(rows)


def plain_extras(extras: Mapping[str, NDArray[Any]]) -> Extras:
    """As they are sent: contiguous and little-endian, copied only where they are not; read-only."""
    plain: Extras = {}
    for name, array in extras.items():
        # asarray, not ascontiguousarray: that one makes a row of a single number.
        view = np.asarray(array, _as_sent(array), order="C").view()
        view.setflags(write=False)
        plain[name] = view
    return plain


def row_of(facts: TrajectoryHeader) -> tuple[int, ...]:
    """Bytes of the block of a trajectory, and of each of its large arrays."""
    block, large = 0, []
    for size in map(wire.extra_size, facts.extras):
        if size >= LARGE_ARRAY:
            large.append(size)
        else:
            block += _padded(size)
    return block, *large


def joined_size(rows: Iterable[tuple[int, ...]]) -> int:
    return sum(block for block, *_ in rows if block < LARGE_ARRAY)


@dataclass(frozen=True, slots=True)
class SideFrames:
    """The frames of the extras of some trajectories, at least one of which has any."""

    rows: tuple[tuple[int, ...], ...]
    """Per trajectory; see `row_of`."""
    joined: Frame
    own: tuple[Frame, ...]

    @property
    def frames(self) -> list[Frame]:
        return [self.joined, *self.own]

    def part(self, first: int, count: int) -> tuple[list[Frame], tuple[Frame, ...]]:
        """`(pieces of a joined frame, own frames)` of `count` trajectories from `first` on."""
        if count == len(self.rows):
            return [self.joined], self.own
        before, taken = self.rows[:first], self.rows[first : first + count]
        start, at = joined_size(before), len(own_sizes(before))
        piece = memoryview(self.joined)[start : start + joined_size(taken)]
        return [piece], self.own[at : at + len(own_sizes(taken))]


def rows_of(facts: Sequence[TrajectoryHeader]) -> tuple[tuple[int, ...], ...]:
    """Of trajectories that follow each other; empty when none of them has extras."""
    for header in facts:
        if header.extras:
            return tuple(map(row_of, facts))
    return ()


def join_extras(trajectories: Sequence[Trajectory], facts: Sequence[TrajectoryHeader]) -> SideFrames | None:
    """Small arrays are copied once, large ones that are as they are sent not at all. None without any extras."""
    rows = rows_of(facts)
    if not rows:
        return None
    joined: list[Any] = []
    own: list[Frame] = []
    for trajectory, row in zip(trajectories, rows, strict=True):
        block: list[Any] = []
        large: list[Frame] = []
        for array in plain_extras(trajectory.extras).values():
            # Not its own buffer: that of a float16 or of an array without items cannot be cast.
            raw = array.reshape(-1).view(np.uint8).data
            if array.nbytes >= LARGE_ARRAY:
                large.append(raw)
            else:
                block += [raw, bytes(_padded(array.nbytes) - array.nbytes)]
        if row[0] >= LARGE_ARRAY:
            own.append(b"".join(block))
        else:
            joined += block
        own += large
    return SideFrames(rows, b"".join(joined), tuple(own))


def side_frames_of(rows: Sequence[tuple[int, ...]], frames: Sequence[Frame]) -> SideFrames:
    """Frames as they came. Raises WireError when their sizes are not those of the rows."""
    expected = [joined_size(rows), *own_sizes(rows)]
    came = [*map(len, frames)]
    if came != expected:
        raise WireError(f"extras of {expected[:8]} bytes follow from the header, {came[:8]} bytes came")
    return SideFrames(tuple(rows), frames[0], tuple(frames[1:]))


def decode_extras(facts: Sequence[TrajectoryHeader], side: SideFrames) -> list[Extras]:
    """Of each trajectory, as they were attached. Read-only: views of the frames, as far as those are aligned."""
    own, start = iter(side.own), 0
    decoded: list[Extras] = []
    for header, row in zip(facts, side.rows, strict=True):
        if row[0] >= LARGE_ARRAY:
            block, at = next(own), 0
        else:
            block, at = side.joined, start
            start += row[0]
        extras: Extras = {}
        for extra in header.extras:
            size = wire.extra_size(extra)
            if size >= LARGE_ARRAY:
                extras[extra.name] = _array(extra, next(own), 0)
            else:
                extras[extra.name] = _array(extra, block, at)
                at += _padded(size)
        decoded.append(extras)
    return decoded


def _array(extra: ExtraHeader, frame: Frame, offset: int) -> NDArray[Any]:
    view = np.require(np.ndarray(extra.shape, extra.dtype, frame, offset), requirements="A")
    # An environment can make bools of any bytes (`view`), which are true for one operation and false for the next. Here
    # nobody could refuse them any more: the step would be planned with this trajectory again.
    if extra.dtype == "|b1" and view.size and (raw := view.view(np.uint8)).max() > 1:
        view = np.asarray(raw != 0)
    view.setflags(write=False)
    return view


def _as_sent(array: NDArray[Any]) -> np.dtype[Any]:
    return array.dtype.newbyteorder("<")


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
