"""Encodes `Trajectory.extras` in their own frames. Nothing on the way reads them except `ref_logprobs`.

    joined frame   a block per trajectory: its arrays below 256 KiB, one after another, each starting at a multiple of 8
    own frames     blocks and arrays of 256 KiB or more: trajectory by trajectory, its block first

Only groups with extras have these frames. As with columns, the layout follows from the headers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WireError
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import LARGE_ARRAY, Frame, Frames, checked_sizes, joined_sizes
from asyncrl.types import ExtraHeader, Trajectory, TrajectoryHeader

Extras = dict[str, NDArray[Any]]
ALIGNED = 8
"""Alignment of arrays, in bytes: that of the largest item. A misaligned view would have to be copied before it is used
in a computation."""


def describe_extras(extras: Mapping[str, Any]) -> tuple[ExtraHeader, ...]:
    """Return the headers of extras, checked as the server will check them. Raises WireError."""
    for name, array in extras.items():
        if not isinstance(array, np.ndarray):
            raise WireError(f"extra {wire.short(name)} must be a numpy array, not {type(array).__name__}")
    rows = [[name, _as_sent(array).str, list(array.shape)] for name, array in extras.items()]
    return wire.decode_extra_headers(rows)


def plain_extras(extras: Mapping[str, NDArray[Any]]) -> Extras:
    """Return extras as they are sent: contiguous, little-endian and read-only; copied only if they are not already."""
    plain: Extras = {}
    for name, array in extras.items():
        # asarray, because ascontiguousarray turns a scalar into a row.
        view = np.asarray(array, _as_sent(array), order="C").view()
        view.setflags(write=False)
        plain[name] = view
    return plain


def row_of(facts: TrajectoryHeader) -> tuple[int, ...]:
    """Return the bytes of a trajectory's block, followed by those of each of its large arrays."""
    block, large = 0, []
    for size in map(wire.extra_size, facts.extras):
        if size >= LARGE_ARRAY:
            large.append(size)
        else:
            block += _padded(size)
    return block, *large


def rows_of(facts: Sequence[TrajectoryHeader]) -> tuple[tuple[int, ...], ...]:
    """Return `row_of` each of consecutive trajectories; empty if none of them has extras."""
    for header in facts:
        if header.extras:
            return tuple(map(row_of, facts))
    return ()


def join_extras(trajectories: Sequence[Trajectory], facts: Sequence[TrajectoryHeader]) -> Frames | None:
    """Put extras into frames; None if there are none. Small arrays are copied once; large ones not at all if they
    already have the form that is sent."""
    rows = rows_of(facts)
    if not rows:
        return None
    joined: list[Any] = []
    own: list[Frame] = []
    for trajectory, row in zip(trajectories, rows, strict=True):
        block: list[Any] = []
        large: list[Frame] = []
        for array in plain_extras(trajectory.extras).values():
            # View as uint8 first: the buffer of a float16 array or of an empty one cannot be cast.
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
    return Frames(rows, b"".join(joined), tuple(own), joined_sizes(rows, 1))


def side_frames_of(rows: Sequence[tuple[int, ...]], frames: Sequence[Frame]) -> Frames:
    """Return received frames of extras. Raises WireError if their sizes are not those of the rows."""
    sizes = checked_sizes(rows, 1, "extras", frames)
    return Frames(tuple(rows), frames[0], tuple(frames[1:]), sizes)


def decode_extras(facts: Sequence[TrajectoryHeader], side: Frames) -> list[Extras]:
    """Return the extras of each trajectory as they were attached: read-only, and views of the frames if those are
    aligned."""
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
    # An environment can make bools of arbitrary bytes (`view`), which some operations take as true and others as false.
    # They are normalized because refusing them here is too late: the step would be planned with this trajectory again.
    if extra.dtype == "|b1" and view.size and (raw := view.view(np.uint8)).max() > 1:
        view = np.asarray(raw != 0)
    view.setflags(write=False)
    return view


def _as_sent(array: NDArray[Any]) -> np.dtype[Any]:
    return array.dtype.newbyteorder("<")


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
