"""Trajectory groups as frames, and the checks that a group must pass on either side.

    insert:  [envelope] [texts] [blob of trajectory 0 | blob of trajectory 1 | ...] [large array] ...
    blob:    token_ids i4 [T] | behavior_logprobs f4 [T - P] | loss_mask u1 [T - P], each padded to 8

A blob says nothing of itself: what is in it follows from the trajectory's header, T tokens of which the first P are the
prompt. Log-probs of a prompt are 0 and not sent, the mask only where it is not true throughout; `policy_versions` is
rebuilt from its runs in the header, where the gates need them. Arrays of 256 KiB or more travel in frames of their own
(measured best). Blobs start at multiples of 8: the server cuts out the trajectories of a rank without reading them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WireError
from asyncrl.replay import wire
from asyncrl.types import NO_VERSION, GroupHeader, Trajectory, TrajectoryGroup, TrajectoryHeader

Frame = bytes | memoryview

LARGE_ARRAY = 256 << 10
"""Bytes from which an array gets a frame of its own."""
MAX_LOGPROB = 1e-3
"""Rounding may lift a log-prob a little above 0; more is a broken engine."""
MAX_VOCABULARY = 1 << 31
"""Of a model that nobody has announced yet."""
IDS, LOGPROBS, MASK = np.dtype("<i4"), np.dtype("<f4"), np.dtype("|u1")
SHARED = 1 << 16
"""Tokens up to which a prompt or completion has its mask and version from arrays that all trajectories share."""
_ALIGN = 8


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    header: GroupHeader
    layout: list[list[int]]
    """Per trajectory `[bytes in the joined frame, frames of its own]`."""
    frames: list[Frame]
    """Texts, joined blobs, large arrays."""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group as the server keeps it: frames as they came, and where each trajectory lies."""

    texts: Frame
    joined: Frame
    """All blobs."""
    blobs: tuple[memoryview, ...]
    """Per trajectory, out of `joined`."""
    large: tuple[tuple[Frame, ...], ...]

    def neighbours(self, first: int, count: int) -> Frame:
        """The blobs of some trajectories that follow each other; all of them are the frame as it came."""
        if count == len(self.blobs):
            return self.joined
        start = sum(len(blob) for blob in self.blobs[:first])
        size = sum(len(blob) for blob in self.blobs[first : first + count])
        return memoryview(self.joined)[start : start + size]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A group whose payload a shard keeps: which one, and under what tag."""

    shard: int
    tag: str


def check_trajectory(trajectory: Trajectory) -> TrajectoryHeader:
    """The facts of a trajectory, once its arrays are found to agree.

    Raises:
        WireError: lengths differ, dtypes are wrong, a log-prob or reward is not finite, a loss token has no version.
    """
    arrays = {
        "token_ids": (trajectory.token_ids, np.int32),
        "loss_mask": (trajectory.loss_mask, np.bool_),
        "behavior_logprobs": (trajectory.behavior_logprobs, np.float32),
        "policy_versions": (trajectory.policy_versions, np.int32),
    }
    length = len(trajectory.token_ids)
    if not 1 <= length <= wire.MAX_TOKENS:
        raise WireError(f"a trajectory has 1 to {wire.MAX_TOKENS} tokens, not {length}")
    for name, (array, dtype) in arrays.items():
        if array.dtype != dtype or array.shape != (length,):
            raise WireError(f"{name} must be {np.dtype(dtype)}[{length}], not {array.dtype}{list(array.shape)}")
    mask = trajectory.loss_mask
    loss_tokens = int(np.count_nonzero(mask))
    prompt_length = int(mask.argmax()) if loss_tokens else length
    logprobs = trajectory.behavior_logprobs[prompt_length:]
    _check_values(trajectory.token_ids, logprobs, mask[prompt_length:], MAX_VOCABULARY)
    runs = runs_of(trajectory.policy_versions[_sampled(mask, prompt_length, loss_tokens)])
    if any(version < 0 for version, _ in runs):
        raise WireError("every loss token needs the policy_version that sampled it")
    wire.number(trajectory.reward, "reward")
    for name, value in trajectory.rewards.items():
        wire.number(value, f"rewards[{name!r}]")
    return TrajectoryHeader(
        length=length,
        prompt_length=prompt_length,
        reward=float(trajectory.reward),
        version_tokens=runs,
        rewards={name: float(value) for name, value in trajectory.rewards.items()},
        finish_reason=wire.text(trajectory.finish_reason, "finish_reason", wire.MAX_NAME),
    )


def _sampled(mask: NDArray[np.bool_], prompt_length: int, loss_tokens: int) -> slice | NDArray[np.bool_]:
    """Index of the loss tokens. A slice where they are all that follows the prompt: no copy, many times faster."""
    return slice(prompt_length, None) if loss_tokens == len(mask) - prompt_length else mask


def _check_values(
    token_ids: NDArray[np.int32], logprobs: NDArray[np.float32], mask: NDArray[np.bool_] | None, vocabulary: int
) -> None:
    """Of one trajectory: `[T]`, and twice `[N]`, with no mask where all N are sampled."""
    # A NaN is the minimum of whatever holds it, and compares false. Nearly always all log-probs are fine, and picking
    # out those of the loss tokens costs more than looking at all.
    low, high = np.minimum.reduce, np.maximum.reduce  # Half the price of the methods where arrays are short.
    if logprobs.size and not (-np.inf < low(logprobs) and high(logprobs) <= MAX_LOGPROB):
        sampled = logprobs if mask is None else logprobs[mask]
        if sampled.size and not (-np.inf < low(sampled) and high(sampled) <= MAX_LOGPROB):
            raise WireError("behavior_logprobs of loss tokens must be finite and not above 0")
    if high(token_ids.view(np.uint32)) < vocabulary:  # A negative id is a large one here.
        return
    if low(token_ids) < 0:
        raise WireError("token_ids must not be negative")
    raise WireError(f"token_ids must be below the vocabulary of {vocabulary}; got {high(token_ids)}")


def runs_of(versions: NDArray[np.int32]) -> tuple[tuple[int, int], ...]:
    """Runs `(version, count)` of `[N]` versions, in order."""
    if not versions.size:
        return ()
    if np.minimum.reduce(versions) == np.maximum.reduce(versions):  # Cheaper than comparing each with the first.
        return ((int(versions[0]), len(versions)),)
    starts = np.flatnonzero(np.r_[True, versions[1:] != versions[:-1]])
    counts = np.diff(np.r_[starts, len(versions)])
    return tuple(zip(versions[starts].tolist(), counts.tolist(), strict=True))


def group_header(group: TrajectoryGroup, nbytes: int = 0) -> GroupHeader:
    """Raises WireError when a trajectory is not fit to be trained on."""
    if not 1 <= len(group.trajectories) <= wire.MAX_TRAJECTORIES:
        raise WireError(f"a group has 1 to {wire.MAX_TRAJECTORIES} trajectories, not {len(group.trajectories)}")
    return GroupHeader(
        group_id=wire.integer(group.group_id, "group_id", 0, wire.MAX_ID),
        prompt_index=wire.integer(group.prompt_index, "prompt_index", 0, wire.MAX_ID),
        attempt=wire.integer(group.attempt, "attempt", 0, wire.MAX_VERSION),
        worker=group.worker,
        trajectories=tuple(check_trajectory(trajectory) for trajectory in group.trajectories),
        nbytes=nbytes,
    )


def encode_group(group: TrajectoryGroup) -> EncodedGroup:
    """Raises WireError when the group is not fit to be trained on: better here than at the learner."""
    header = group_header(group)
    parts: list[Frame] = []
    large: list[Frame] = []
    layout: list[list[int]] = []
    for trajectory, facts in zip(group.trajectories, header.trajectories, strict=True):
        inline, own = _encode_trajectory(trajectory, facts)
        layout.append([sum(len(part) for part in inline), len(own)])
        parts.extend(inline)
        large.extend(own)
    texts = wire.pack(
        [group.prompt_text, list(group.completion_texts), float(group.started_at), float(group.finished_at)]
    )
    frames: list[Frame] = [texts, b"".join(parts), *large]
    return EncodedGroup(replace(header, nbytes=sum(len(frame) for frame in frames)), layout, frames)


def _encode_trajectory(trajectory: Trajectory, facts: TrajectoryHeader) -> tuple[list[Frame], list[Frame]]:
    """`(parts of the blob, large arrays)`, both without a copy where the arrays are contiguous."""
    start = facts.prompt_length
    arrays = [(IDS, trajectory.token_ids), (LOGPROBS, trajectory.behavior_logprobs[start:])]
    if facts.loss_tokens != facts.length - start:
        arrays.append((MASK, trajectory.loss_mask[start:]))
    inline: list[Frame] = []
    own: list[Frame] = []
    for dtype, array in arrays:
        if not array.size:
            continue
        raw = np.ascontiguousarray(array, dtype).data.cast("B")
        if len(raw) >= LARGE_ARRAY:
            own.append(raw)
            continue
        inline.append(raw)  # Copied once, when the parts are joined.
        if len(raw) % _ALIGN:
            inline.append(bytes(-len(raw) % _ALIGN))
    return inline, own


def split_frames(header: GroupHeader, layout: Any, frames: Sequence[Frame]) -> StoredGroup:
    """What the server does with an insert: check the sizes against the header. See `check_stored` for the values.

    Raises:
        WireError: frames are missing, too many, or not of the announced sizes.
    """
    rows = wire.sequence(layout, "layout", len(header.trajectories))
    if len(frames) < 2:
        raise WireError(f"a group needs at least 2 payload frames, got {len(frames)}")
    if sum(len(frame) for frame in frames) != header.nbytes:
        raise WireError(f"the header announces {header.nbytes} payload bytes, the frames have another size")
    sizes: list[int] = []
    large: list[tuple[Frame, ...]] = []
    left, next_frame = len(frames[1]), 2
    for row in rows:
        size, own = wire.sequence(row, "layout row", 2)
        left -= wire.integer(size, "blob size", 0, left)
        wire.integer(own, "own frames", 0, len(frames) - next_frame)
        sizes.append(size)
        large.append(tuple(frames[next_frame : next_frame + own]))
        next_frame += own
    if left or next_frame != len(frames):
        raise WireError("the layout does not cover the payload frames")
    return StoredGroup(frames[0], frames[1], cut(frames[1], sizes), tuple(large))


def cut(joined: Frame, sizes: Sequence[int]) -> tuple[memoryview, ...]:
    """Views of the blobs of these sizes, one after the other."""
    view, ends = memoryview(joined), itertools.accumulate(sizes)
    return tuple(view[end - size : end] for end, size in zip(ends, sizes, strict=True))


def check_stored(header: GroupHeader, stored: StoredGroup, vocabulary: int) -> None:
    """What the learner will rely on, found out at the door: the arrays agree with the header that the gates judge, and
    every value is one that can be trained on. Nothing is copied or kept.

    Args:
        vocabulary: token ids are below it.

    Raises:
        WireError: names what is wrong.
    """
    decode_texts(stored.texts)
    for facts, blob, own in zip(header.trajectories, stored.blobs, stored.large, strict=True):
        token_ids, logprobs, mask = _arrays(facts, blob, own)
        _check_values(token_ids, logprobs, mask, vocabulary)


def decode_trajectory(header: TrajectoryHeader, blob: Frame, own: Sequence[Frame]) -> Trajectory:
    """Arrays from bytes, of the sizes that follow from the header; their values are those that `check_stored` let in.
    Not to be written to: token ids are a view of the frame, masks and versions may be shared.

    Raises:
        WireError: the sizes or the mask do not agree with the header.
    """
    token_ids, sent_logprobs, sent_mask = _arrays(header, blob, own)
    length, start = header.length, header.prompt_length
    logprobs = np.empty(length, np.float32)
    logprobs[:start], logprobs[start:] = 0.0, sent_logprobs
    if sent_mask is None:
        mask = _step(False, True, np.dtype(np.bool_), start, length)
    else:
        mask = np.concatenate((np.zeros(start, np.bool_), sent_mask))
    return Trajectory(
        token_ids=token_ids,
        loss_mask=mask,
        behavior_logprobs=logprobs,
        policy_versions=_versions(header, sent_mask),
        reward=header.reward,
        rewards=dict(header.rewards),
        finish_reason=header.finish_reason,
    )


def _versions(header: TrajectoryHeader, mask: NDArray[np.bool_] | None) -> NDArray[np.int32]:
    """`[T]` from the runs; `mask` as `_arrays` gives it."""
    length, start = header.length, header.prompt_length
    if mask is None and len(header.version_tokens) == 1:
        return _step(NO_VERSION, header.version_tokens[0][0], np.dtype(np.int32), start, length)
    versions = np.full(length, NO_VERSION, np.int32)
    runs = np.array(header.version_tokens, np.int32).reshape(-1, 2)
    versions[start:][slice(None) if mask is None else mask] = np.repeat(runs[:, 0], runs[:, 1])
    return versions


def _step(low: int, high: int, dtype: np.dtype[Any], start: int, length: int) -> NDArray[Any]:
    """`[length]`: `low` before `start`, `high` from there on."""
    if start > SHARED or length - start > SHARED:
        return np.repeat(np.array((low, high), dtype), (start, length - start))
    return _shared_step(low, high, dtype)[SHARED - start : SHARED - start + length]


@functools.lru_cache(maxsize=16)
def _shared_step(low: int, high: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """`[2 * SHARED]`, read-only. Few versions are in use at a time, and writing them out for each trajectory costs as
    much as receiving its token ids."""
    both = np.repeat(np.array((low, high), dtype), SHARED)
    both.setflags(write=False)
    return both


def _arrays(
    header: TrajectoryHeader, blob: Frame, own: Sequence[Frame]
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.bool_] | None]:
    """`(token ids [T], log-probs [T - P], mask [T - P])` as views, no mask where it is all true; see the module."""
    tail, loss_tokens = header.length - header.prompt_length, header.loss_tokens
    sizes = [4 * header.length, 4 * tail] if loss_tokens == tail else [4 * header.length, 4 * tail, tail]
    sources: list[Frame] = []
    used, at = 0, 0
    for size in sizes:
        if size >= LARGE_ARRAY:
            sources.append(own[used] if used < len(own) else b"")
            used += 1
        else:
            sources.append(blob[at : at + size])
            at += size + -size % _ALIGN
    if at != len(blob) or used != len(own) or [len(source) for source in sources] != sizes:
        came = [len(blob), *(len(frame) for frame in own)]
        raise WireError(f"arrays of {sizes} bytes follow from the header, frames of {came} bytes came")
    mask = None
    if len(sources) == 3:
        mask = _mask(np.frombuffer(sources[2], MASK), loss_tokens)
    return np.frombuffer(sources[0], IDS), np.frombuffer(sources[1], LOGPROBS), mask


def _mask(raw: NDArray[np.uint8], loss_tokens: int) -> NDArray[np.bool_]:
    if np.maximum.reduce(raw) > 1:
        raise WireError("loss_mask must be 0 or 1")
    found = int(np.count_nonzero(raw))
    if found != loss_tokens:
        raise WireError(f"{found} loss tokens came, the header announced {loss_tokens}")
    if not raw[0]:
        raise WireError("the loss mask does not begin where the header says the prompt ends")
    return raw.view(np.bool_)


def decode_texts(frame: Frame) -> tuple[str, tuple[str, ...], float, float]:
    """`(prompt text, completion texts, started_at, finished_at)`. Raises WireError."""
    value = wire.unpack(frame, max_bytes=wire.MAX_MESSAGE_BYTES)
    prompt, completions, started, finished = wire.sequence(value, "texts", 4)
    return (
        wire.text(prompt, "prompt_text", wire.MAX_MESSAGE_BYTES),
        tuple(
            wire.text(completion, "completion_text", wire.MAX_MESSAGE_BYTES)
            for completion in wire.sequence(completions, "completion_texts", limit=wire.MAX_TRAJECTORIES)
        ),
        wire.number(started, "started_at"),
        wire.number(finished, "finished_at"),
    )
