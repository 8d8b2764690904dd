"""Encodes trajectory groups as frames, and has the checks that a group must pass on both sides.

    insert:  [envelope] [texts] [joined columns of all trajectories] [large array] ... [joined extras] [large extra] ...

The contents of the frames follow from the header; see `columns.py` and `extras.py`. The server checks every value on
arrival, but of extras only the sizes (and the log-probs of a reference), and forwards the frames unchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WireError
from asyncrl.recorded import is_checked, recorded_fault
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Columns, Frame, Frames, columns_of, decode, join, own_sizes, sizes_of
from asyncrl.replay.codec.extras import decode_extras, describe_extras, join_extras, rows_of, side_frames_of
from asyncrl.types import MAX_LOGPROB, GroupHeader, Routers, Trajectory, TrajectoryGroup, TrajectoryHeader, turns_in

MAX_VOCABULARY = 1 << 31
"""Vocabulary size assumed until a model is announced."""
_INT32, _BOOL, _FLOAT32 = np.dtype(np.int32), np.dtype(np.bool_), np.dtype(np.float32)
Sampled = tuple[NDArray[np.float32], NDArray[np.bool_] | None]
"""Log-probs [N] of tokens, and the mask of those that were sampled; None: all were."""


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    header: GroupHeader
    frames: list[Frame]
    """In order: texts, joined columns, large arrays, extras."""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group as the server keeps it: the frames as received, and their layout."""

    texts: Frame
    columns: Columns
    side: Frames | None = None
    """The extras; None if there are none."""

    @property
    def frames(self) -> list[Frame]:
        return [self.texts, *self.columns.frames, *(self.side.frames if self.side else ())]

    def trajectories(self, facts: Sequence[TrajectoryHeader]) -> list[Trajectory]:
        """Decode all trajectories, including extras. Raises WireError if values do not agree with their headers."""
        decoded = decode(facts, self.columns)
        if self.side is None:
            return decoded
        pairs = zip(decoded, decode_extras(facts, self.side), strict=True)
        return [replace(trajectory, extras=extras) for trajectory, extras in pairs]


def group_header(group: TrajectoryGroup) -> GroupHeader:
    """Return the header of a group. Raises WireError if a trajectory cannot be trained on."""
    header = _header_of(group)
    _check_ids((trajectory.token_ids for trajectory in group.trajectories), MAX_VOCABULARY)
    _check_sampled((trajectory.behavior_logprobs, trajectory.loss_mask) for trajectory in group.trajectories)
    return header


def encode_group(group: TrajectoryGroup) -> EncodedGroup:
    """Encode a group. Raises WireError if it cannot be trained on, so that it fails here and not at the learner."""
    header = _header_of(group)
    columns = join(group.trajectories, header.trajectories)
    check_columns(header.trajectories, columns, MAX_VOCABULARY)
    texts = wire.pack(
        [group.prompt_text, list(group.completion_texts), float(group.started_at), float(group.finished_at)]
    )
    frames = StoredGroup(texts, columns, join_extras(group.trajectories, header.trajectories)).frames
    return EncodedGroup(replace(header, nbytes=sum(map(len, frames))), frames)


def split_frames(header: GroupHeader, frames: Sequence[Frame]) -> StoredGroup:
    """Split the frames of an insert, checking their sizes against the header. `check_stored` checks the values.

    Raises:
        WireError: there are too few or too many frames, or their sizes do not follow from the header.
    """
    if len(frames) < 2:
        raise WireError(f"a group needs at least 2 payload frames, got {len(frames)}")
    _check_size(header.nbytes)
    if sum(map(len, frames)) != header.nbytes:
        raise WireError(f"the header announces {header.nbytes} payload bytes, but the frames have another size")
    side = rows_of(header.trajectories)
    if not side:
        return StoredGroup(frames[0], columns_of(header.trajectories, frames[1], frames[2:]))
    end = 2 + len(own_sizes(map(sizes_of, header.trajectories)))
    columns = columns_of(header.trajectories, frames[1], frames[2:end])
    return StoredGroup(frames[0], columns, side_frames_of(side, frames[end:]))


def check_stored(header: GroupHeader, stored: StoredGroup, vocabulary: int, routers: Routers | None = None) -> None:
    """Check on arrival what the learner will rely on: the arrays agree with the header by which the gates judge, and
    every value can be trained on. Nothing is copied or kept.

    Args:
        vocabulary: all token ids must be below it.
        routers: the routers whose choices every trajectory must bring; None: no choices are required.

    Raises:
        WireError: the message names what is wrong.
    """
    decode_texts(stored.texts)
    check_columns(header.trajectories, stored.columns, vocabulary)
    if stored.side is None and routers is None:
        return
    read = routers is not None or is_checked(header)
    for place, trajectory in enumerate(stored.trajectories(header.trajectories) if read else ()):
        fault = recorded_fault(trajectory, vocabulary, routers)
        if fault:
            raise WireError(f"trajectory {place} of group {header.group_id}: {fault}")


def check_columns(facts: Sequence[TrajectoryHeader], columns: Columns, vocabulary: int) -> None:
    """Check the values of all trajectories at once. Raises WireError."""
    ids, logprobs = columns.whole()
    _check_ids(ids, vocabulary)
    if columns.has_masks:
        for _ in columns.each(facts):  # Slicing a mask out checks it.
            pass
    # Nearly always all log-probs are valid, and selecting those of sampled tokens costs more than checking all.
    if not all(map(_are_logprobs, logprobs)):
        _check_sampled((sampled, mask) for _, sampled, mask in columns.each(facts))


def _check_ids(arrays: Iterable[NDArray[np.int32]], vocabulary: int) -> None:
    for token_ids in arrays:
        # As uint32, a negative id is a large one.
        if not token_ids.size or np.maximum.reduce(token_ids.view(np.uint32)) < vocabulary:
            continue
        if np.minimum.reduce(token_ids) < 0:
            raise WireError("token_ids must not be negative")
        highest = np.maximum.reduce(token_ids)
        raise WireError(f"token_ids must be below the vocabulary of {vocabulary}; got {highest}")


def _check_sampled(each: Iterable[Sampled]) -> None:
    for logprobs, mask in each:
        if not _are_logprobs(logprobs if mask is None else logprobs[mask]):
            raise WireError("behavior_logprobs of loss tokens must be finite and not above 0")


def _are_logprobs(array: NDArray[np.float32]) -> bool:
    # The minimum of an array with a NaN is NaN, which compares false. Array methods cost twice as much for short
    # arrays.
    return not array.size or bool(-np.inf < np.minimum.reduce(array) and np.maximum.reduce(array) <= MAX_LOGPROB)


def _header_of(group: TrajectoryGroup) -> GroupHeader:
    """Return the header, having checked everything except the values of ids and log-probs."""
    if not 1 <= len(group.trajectories) <= wire.MAX_TRAJECTORIES:
        raise WireError(f"a group has 1 to {wire.MAX_TRAJECTORIES} trajectories, not {len(group.trajectories)}")
    facts = tuple(map(_facts_of, group.trajectories))
    _check_size(sum([wire.extra_size(extra) for header in facts for extra in header.extras]))
    return GroupHeader(
        group_id=wire.integer(group.group_id, "group_id", 0, wire.MAX_ID),
        prompt_index=wire.integer(group.prompt_index, "prompt_index", 0, wire.MAX_ID),
        attempt=wire.integer(group.attempt, "attempt", 0, wire.MAX_VERSION),
        worker=group.worker,
        trajectories=facts,
    )


def _check_size(nbytes: int) -> None:
    if nbytes > wire.MAX_GROUP_BYTES:
        raise WireError(
            f"a group of {nbytes} bytes exceeds the limit of {wire.MAX_GROUP_BYTES}. Attach smaller extras, or lower "
            "rollout.group_size"
        )


def _facts_of(trajectory: Trajectory) -> TrajectoryHeader:
    """Return the header of one trajectory. Raises WireError: lengths differ, dtypes are wrong, a reward is not finite,
    or a loss token has no version."""
    length, mask, versions = len(trajectory.token_ids), trajectory.loss_mask, trajectory.policy_versions
    if not 1 <= length <= wire.MAX_TOKENS:
        raise WireError(f"a trajectory has 1 to {wire.MAX_TOKENS} tokens, not {length}")
    _check_shape("token_ids", trajectory.token_ids, _INT32, length)
    _check_shape("loss_mask", mask, _BOOL, length)
    _check_shape("behavior_logprobs", trajectory.behavior_logprobs, _FLOAT32, length)
    _check_shape("policy_versions", versions, _INT32, length)
    loss_tokens = int(np.count_nonzero(mask))
    prompt_length = int(mask.argmax()) if loss_tokens else length
    # If all tokens after the prompt are loss tokens, a slice needs no copy and is many times faster.
    runs = runs_of(versions[prompt_length:] if loss_tokens == length - prompt_length else versions[mask])
    if any(version < 0 for version, _ in runs):
        raise WireError("every loss token needs the policy_version that sampled it")
    if trajectory.turn_rewards and len(trajectory.turn_rewards) != turns_in(mask):
        raise WireError(
            f"turn_rewards must have one number per turn; it has {len(trajectory.turn_rewards)}, but the loss mask "
            f"has {turns_in(mask)} unbroken runs of loss tokens"
        )
    return TrajectoryHeader(
        length=length,
        prompt_length=prompt_length,
        reward=wire.number(trajectory.reward, "reward"),
        version_tokens=runs,
        rewards={name: wire.number(value, f"rewards[{name!r}]") for name, value in trajectory.rewards.items()},
        turn_rewards=wire.turn_numbers(trajectory.turn_rewards, trajectory.reward),
        finish_reason=wire.text(trajectory.finish_reason, "finish_reason", wire.MAX_NAME),
        branch=trajectory.branch,
        extras=describe_extras(trajectory.extras) if trajectory.extras else (),
    )


def _check_shape(name: str, array: NDArray[Any], dtype: np.dtype[Any], length: int) -> None:
    if array.dtype != dtype or array.shape != (length,):
        raise WireError(f"{name} must be {dtype}[{length}], not {array.dtype}{list(array.shape)}")


def runs_of(versions: NDArray[np.int32]) -> tuple[tuple[int, int], ...]:
    """Return the runs `(version, count)` of `[N]` versions, in order."""
    if not versions.size:
        return ()
    if np.minimum.reduce(versions) == np.maximum.reduce(versions):  # cheaper than comparing each with the first
        return ((int(versions[0]), len(versions)),)
    starts = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist()]
    stops = [*starts[1:], len(versions)]
    return tuple((int(versions[start]), stop - start) for start, stop in zip(starts, stops, strict=True))


def decode_texts(frame: Frame) -> tuple[str, tuple[str, ...], float, float]:
    """Decode `(prompt text, completion texts, started_at, finished_at)`. Raises WireError."""
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


def group_of(header: GroupHeader, texts: Frame, trajectories: Sequence[Trajectory]) -> TrajectoryGroup:
    """Return a whole group from its header, texts frame and trajectories. Raises WireError."""
    prompt_text, completion_texts, started_at, finished_at = decode_texts(texts)
    return TrajectoryGroup(
        group_id=header.group_id,
        prompt_index=header.prompt_index,
        attempt=header.attempt,
        worker=header.worker,
        trajectories=tuple(trajectories),
        prompt_text=prompt_text,
        completion_texts=completion_texts,
        started_at=started_at,
        finished_at=finished_at,
    )


def join_texts(frames: Sequence[Frame]) -> Frame:
    """Return the texts frame of a group, from those of its members: the prompt once, every completion, the earliest
    start and the latest end. Raises WireError."""
    if len(frames) == 1:
        return frames[0]
    prompts, completions, started, finished = zip(*map(decode_texts, frames), strict=True)
    return wire.pack([prompts[0], list(itertools.chain(*completions)), min(started), max(finished)])
