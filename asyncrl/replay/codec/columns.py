"""Layout of the arrays of consecutive trajectories in frames: one column per field.

    joined frame   token_ids i4 [T] of each | behavior_logprobs f4 [N] of each | loss_mask u1 [N] of each
    own frames     arrays of 256 KiB or more, which are in no column: trajectory by trajectory, in the same order

A trajectory has T tokens, of which the last N follow the prompt. Log-probs of a prompt are 0 and not sent; the mask is
sent only if it is not true throughout; `policy_versions` is rebuilt from its runs in the header. Frames do not describe
themselves: their contents follow from the headers. With columns, all values of a group are checked at once, and the
trajectories of a rank are sliced out without reading them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WireError
from asyncrl.types import NO_VERSION, Trajectory, TrajectoryHeader, turns_in

Frame = bytes | memoryview
Sizes = tuple[int, int, int]
"""Bytes of the token ids, log-probs and mask of one trajectory; 0: not sent."""
Arrays = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.bool_] | None]
"""Token ids [T], log-probs [N] and mask [N] of one trajectory; a mask that is all true is None."""

LARGE_ARRAY = 256 << 10
"""Size in bytes from which an array gets its own frame (measured best)."""
SHARED = 1 << 16
"""Length in tokens up to which a prompt or completion takes its mask and versions from arrays shared by all
trajectories."""
IDS, LOGPROBS, MASK = np.dtype("<i4"), np.dtype("<f4"), np.dtype("|u1")
_ITEM = 4
"""Bytes of a token id, and also of a log-prob."""


def sizes_of(facts: TrajectoryHeader) -> Sizes:
    tail = facts.length - facts.prompt_length
    return _ITEM * facts.length, _ITEM * tail, 0 if facts.loss_tokens == tail else tail


def own_sizes(rows: Iterable[tuple[int, ...]]) -> list[int]:
    """Return the size in bytes of each frame that holds one array."""
    return [size for row in rows for size in row if size >= LARGE_ARRAY]


def joined_sizes(rows: Iterable[tuple[int, ...]], columns: int = 3) -> list[int]:
    """Return `[columns]` sizes in bytes of the columns of the joined frame."""
    each = itertools.islice(zip(*rows, strict=False), columns)
    return [sum(size) if max(size) < LARGE_ARRAY else sum(some for some in size if some < LARGE_ARRAY) for size in each]


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of consecutive trajectories, and the sizes of what is in them."""

    rows: tuple[tuple[int, ...], ...]
    """Sizes of each trajectory's arrays: first those that are in columns if they are small, then large ones."""
    joined: Frame
    own: tuple[Frame, ...]
    sizes: Sequence[int]
    """`joined_sizes` of the rows."""

    @property
    def frames(self) -> list[Frame]:
        return [self.joined, *self.own]

    def part(self, first: int, count: int) -> tuple[list[Frame], tuple[Frame, ...]]:
        """Return `(pieces of a joined frame, own frames)` of `count` trajectories from `first` on. For all of them, the
        frame is returned as received."""
        if count == len(self.rows):
            return [self.joined], self.own
        stop, start, pieces, view, columns = first + count, 0, [], memoryview(self.joined), len(self.sizes)
        before = joined_sizes(self.rows[:first], columns) if first else [0] * columns
        taken = joined_sizes(self.rows[first:stop], columns)
        for skipped, size, column in zip(before, taken, self.sizes, strict=True):
            pieces.append(view[start + skipped : start + skipped + size])
            start += column
        if not self.own:
            return pieces, ()
        at = len(own_sizes(self.rows[:first]))
        return pieces, self.own[at : at + len(own_sizes(self.rows[first:stop]))]


class Columns(Frames):
    """The frames of token ids, log-probs and masks: a column of each, and three sizes in each row."""

    __slots__ = ()

    @property
    def has_masks(self) -> bool:
        return any(row[2] for row in self.rows)

    def whole(self) -> tuple[list[NDArray[np.int32]], list[NDArray[np.float32]]]:
        """Return all token ids and all log-probs as views, in as few arrays as possible."""
        ids, logprobs, _ = self._cut()
        own = iter(self.own)
        sets: tuple[list[Any], list[Any], list[Any]] = [ids], [logprobs], []
        for row in self.rows if self.own else ():
            for place, size in enumerate(row):
                if size >= LARGE_ARRAY:
                    sets[place].append(np.frombuffer(next(own), (IDS, LOGPROBS, MASK)[place]))
        return sets[0], sets[1]

    def each(self, facts: Sequence[TrajectoryHeader]) -> Iterator[Arrays]:
        """Iterate over the arrays of each trajectory, as views.

        Raises:
            WireError: a mask does not agree with the header.
        """
        ids, logprobs, masks = self._cut()
        own, a, b, c = iter(self.own), 0, 0, 0
        for header, (id_bytes, logprob_bytes, mask_bytes) in zip(facts, self.rows, strict=True):
            length, tail = id_bytes // _ITEM, logprob_bytes // _ITEM
            if id_bytes < LARGE_ARRAY:
                token_ids, a = ids[a : a + length], a + length
            else:
                token_ids = np.frombuffer(next(own), IDS)
            if logprob_bytes < LARGE_ARRAY:
                sampled, b = logprobs[b : b + tail], b + tail
            else:
                sampled = np.frombuffer(next(own), LOGPROBS)
            if not mask_bytes:
                yield token_ids, sampled, None
                continue
            if mask_bytes < LARGE_ARRAY:
                raw, c = masks[c : c + mask_bytes], c + mask_bytes
            else:
                raw = np.frombuffer(next(own), MASK)
            yield token_ids, sampled, _mask(raw, header)

    def _cut(self) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.uint8]]:
        ids, logprobs, _ = self.sizes
        raw = np.frombuffer(self.joined, MASK)
        return raw[:ids].view(IDS), raw[ids : ids + logprobs].view(LOGPROBS), raw[ids + logprobs :]


def join(trajectories: Sequence[Trajectory], facts: Sequence[TrajectoryHeader]) -> Columns:
    """Put trajectories into columns. Each array is copied once, or not at all if it is large and contiguous."""
    rows = tuple(sizes_of(header) for header in facts)
    columns: tuple[list[Any], list[Any], list[Any]] = [], [], []
    own: list[Frame] = []
    for trajectory, header, row in zip(trajectories, facts, rows, strict=True):
        start = header.prompt_length
        arrays = (
            np.ascontiguousarray(trajectory.token_ids, IDS),
            np.ascontiguousarray(trajectory.behavior_logprobs[start:], LOGPROBS),
            np.ascontiguousarray(trajectory.loss_mask[start:]) if row[2] else None,
        )
        for size, array, column in zip(row, arrays, columns, strict=True):
            if size >= LARGE_ARRAY and array is not None:
                own.append(array.data.cast("B"))
            elif size:
                column.append(array)
    return Columns(rows, b"".join([*columns[0], *columns[1], *columns[2]]), tuple(own), joined_sizes(rows))


def columns_of(facts: Sequence[TrajectoryHeader], joined: Frame, own: Sequence[Frame]) -> Columns:
    """Return the columns of received frames. Raises WireError if their sizes do not follow from the headers."""
    rows = tuple(map(sizes_of, facts))
    return Columns(rows, joined, tuple(own), checked_sizes(rows, 3, "frames", [joined, *own]))


def checked_sizes(rows: Sequence[tuple[int, ...]], columns: int, what: str, frames: Sequence[Frame]) -> list[int]:
    """Return `joined_sizes` of received frames. Raises WireError if their sizes are not those of the rows."""
    sizes = joined_sizes(rows, columns)
    expected, came = [sum(sizes), *own_sizes(rows)], [*map(len, frames)]
    if came != expected:
        raise WireError(f"the header announces {what} of {expected[:8]} bytes, but {came[:8]} bytes arrived")
    return sizes


def decode(facts: Sequence[TrajectoryHeader], columns: Columns) -> list[Trajectory]:
    """Decode trajectories whose values `check_stored` has accepted. The arrays must not be written to: token ids are
    views of the frames, and masks and versions may be shared.

    Raises:
        WireError: a mask does not agree with its header.
    """
    # One array for all: many small ones take longer to allocate and to free.
    all_logprobs, stop = np.empty(sum(header.length for header in facts), np.float32), 0
    decoded: list[Trajectory] = []
    for header, (token_ids, sent, mask) in zip(facts, columns.each(facts), strict=True):
        length, prompt = header.length, header.prompt_length
        start, stop = stop, stop + length
        logprobs = all_logprobs[start:stop]
        logprobs[:prompt], logprobs[prompt:] = 0.0, sent
        loss_mask, versions = _repeated(header, mask)
        decoded.append(
            Trajectory(
                token_ids=token_ids,
                loss_mask=loss_mask,
                behavior_logprobs=logprobs,
                policy_versions=versions,
                reward=header.reward,
                rewards=dict(header.rewards),
                finish_reason=header.finish_reason,
                turn_rewards=header.turn_rewards,
                branch=header.branch,
            )
        )
    return decoded


def _mask(raw: NDArray[np.uint8], header: TrajectoryHeader) -> NDArray[np.bool_]:
    loss_tokens = header.loss_tokens
    if np.maximum.reduce(raw) > 1:
        raise WireError("loss_mask must be 0 or 1")
    found = int(np.count_nonzero(raw))
    if found != loss_tokens:
        raise WireError(f"{found} loss tokens arrived, but the header announced {loss_tokens}")
    if not raw[0]:
        raise WireError("the loss mask does not begin where the prompt ends according to the header")
    mask = raw.view(np.bool_)
    if header.turn_rewards and len(header.turn_rewards) != turns_in(mask):
        raise WireError(f"rewards of {len(header.turn_rewards)} turns arrived, but the loss mask has {turns_in(mask)}")
    return mask


def _repeated(header: TrajectoryHeader, mask: NDArray[np.bool_] | None) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
    """Return `(loss mask [T], versions [T])` from the header; `mask` is as in `Arrays`."""
    length, prompt, runs = header.length, header.prompt_length, header.version_tokens
    if mask is None and len(runs) == 1 and prompt <= SHARED and length - prompt <= SHARED:
        # Only a few versions are in use at a time, and writing both arrays costs as much as receiving the token ids.
        here = slice(SHARED - prompt, SHARED - prompt + length)
        return _shared_mask()[here], _shared_versions(runs[0][0])[here]
    loss_mask, versions = np.zeros(length, np.bool_), np.full(length, NO_VERSION, np.int32)
    loss_mask[prompt:] = True if mask is None else mask
    table = np.array(runs, np.int32).reshape(-1, 2)
    versions[loss_mask] = np.repeat(table[:, 0], table[:, 1])
    return loss_mask, versions


@functools.cache
def _shared_mask() -> NDArray[np.bool_]:
    """`[2 * SHARED]`, read-only: false, then true."""
    return _read_only(np.repeat(np.array((False, True)), SHARED))


@functools.lru_cache(maxsize=16)
def _shared_versions(version: int) -> NDArray[np.int32]:
    """`[2 * SHARED]`, read-only: `NO_VERSION`, then `version`."""
    return _read_only(np.repeat(np.array((NO_VERSION, version), np.int32), SHARED))


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array
