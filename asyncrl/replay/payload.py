"""Trajectory groups as frames, and the checks that a group must pass on either side.

    insert:  [envelope] [texts] [blob of trajectory 0 | blob of trajectory 1 | ...] [large array] ...
    blob:    u32 size of the manifest | manifest (msgpack) | padding to 8 | arrays, each padded to 8

A blob starts at a multiple of 8 in the joined frame, so the server can cut out the trajectories of one rank without
reading them. Arrays of 256 KiB or more travel in frames of their own (measured best). `policy_versions` is not sent:
its runs are in the header, where the gates need them, and it is rebuilt from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
DTYPES = {"<i4": np.dtype("<i4"), "<f4": np.dtype("<f4"), "|u1": np.dtype("|u1")}
ARRAYS = {"token_ids": "<i4", "loss_mask": "|u1", "behavior_logprobs": "<f4"}
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
    blobs: tuple[memoryview, ...]
    large: tuple[tuple[Frame, ...], ...]


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
    _check_values(trajectory.token_ids, trajectory.behavior_logprobs, mask, MAX_VOCABULARY)
    versions = trajectory.policy_versions[_sampled(mask, prompt_length, loss_tokens)]
    if versions.size and np.minimum.reduce(versions) < 0:
        raise WireError("every loss token needs the policy_version that sampled it")
    wire.number(trajectory.reward, "reward")
    for name, value in trajectory.rewards.items():
        wire.number(value, f"rewards[{name!r}]")
    return TrajectoryHeader(
        length=length,
        prompt_length=prompt_length,
        reward=float(trajectory.reward),
        version_tokens=runs_of(versions),
    )


def _sampled(mask: NDArray[np.bool_], prompt_length: int, loss_tokens: int) -> slice | NDArray[np.bool_]:
    """Index of the loss tokens. A slice where they are all that follows the prompt: no copy, many times faster."""
    return slice(prompt_length, None) if loss_tokens == len(mask) - prompt_length else mask


def _check_values(
    token_ids: NDArray[np.int32], logprobs: NDArray[np.float32], mask: NDArray[np.bool_], vocabulary: int
) -> None:
    """All `[T]` of one trajectory."""
    # A NaN is the minimum of whatever holds it, and compares false. Nearly always all log-probs are fine, and picking
    # out those of the loss tokens costs more than looking at all.
    low, high = np.minimum.reduce, np.maximum.reduce  # Half the price of the methods where arrays are short.
    if not (-np.inf < low(logprobs) and high(logprobs) <= MAX_LOGPROB):
        sampled = logprobs[mask]
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
    if versions[0] == versions[-1] and (versions == versions[0]).all():
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
    for trajectory in group.trajectories:
        blob, own = _encode_trajectory(trajectory)
        layout.append([sum(len(part) for part in blob), len(own)])
        parts.extend(blob)
        large.extend(own)
    texts = wire.pack(
        [group.prompt_text, list(group.completion_texts), float(group.started_at), float(group.finished_at)]
    )
    frames: list[Frame] = [texts, b"".join(parts), *large]
    nbytes = sum(len(frame) for frame in frames)
    header = GroupHeader(
        group_id=header.group_id,
        prompt_index=header.prompt_index,
        attempt=header.attempt,
        worker=header.worker,
        trajectories=header.trajectories,
        nbytes=nbytes,
    )
    return EncodedGroup(header, layout, frames)


def _encode_trajectory(trajectory: Trajectory) -> tuple[list[Frame], list[Frame]]:
    """`(blob parts, large frames)`."""
    arrays = {
        "token_ids": trajectory.token_ids,
        "loss_mask": trajectory.loss_mask.view(np.uint8),
        "behavior_logprobs": trajectory.behavior_logprobs,
    }
    own: list[Frame] = []
    inline: list[Frame] = []
    described = []
    offset = 0
    for name, array in arrays.items():
        dtype = ARRAYS[name]
        raw = np.ascontiguousarray(array, DTYPES[dtype])
        if raw.nbytes >= LARGE_ARRAY:
            described.append([name, dtype, len(raw), -1 - len(own)])
            own.append(raw.data.cast("B"))
            continue
        described.append([name, dtype, len(raw), offset])
        padding = -raw.nbytes % _ALIGN
        inline.append(raw.data.cast("B"))  # Copied once, when the parts are joined.
        if padding:
            inline.append(bytes(padding))
        offset += raw.nbytes + padding
    rewards = {name: float(value) for name, value in trajectory.rewards.items()}
    manifest = wire.pack([described, trajectory.finish_reason, float(trajectory.reward), rewards])
    head = _padded(len(manifest).to_bytes(4, "little") + manifest)
    return [head, *inline], own


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGN)


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
    joined = memoryview(frames[1])
    blobs: list[memoryview] = []
    large: list[tuple[Frame, ...]] = []
    position, next_frame = 0, 2
    for row in rows:
        size, own = wire.sequence(row, "layout row", 2)
        wire.integer(size, "blob size", _ALIGN, len(joined) - position)
        wire.integer(own, "own frames", 0, len(frames) - next_frame)
        blobs.append(joined[position : position + size])
        large.append(tuple(frames[next_frame : next_frame + own]))
        position += size
        next_frame += own
    if position != len(joined) or next_frame != len(frames):
        raise WireError("the layout does not cover the payload frames")
    return StoredGroup(frames[0], tuple(blobs), tuple(large))


def decode_trajectory(header: TrajectoryHeader, blob: Frame, own: Sequence[Frame]) -> Trajectory:
    """Arrays from bytes, checked against the header that the gates judged.

    Raises:
        WireError: sizes, dtypes or values are wrong, or do not agree with the header.
    """
    view = memoryview(bytearray(blob))  # One copy for all: writable, and free of the frame's memory.
    arrays, finish_reason, reward, rewards = _parse(header, view, own, MAX_VOCABULARY)
    mask = arrays["loss_mask"]
    versions = np.full(header.length, NO_VERSION, np.int32)
    sampled = _sampled(mask, header.prompt_length, header.loss_tokens)
    if len(header.version_tokens) == 1:
        versions[sampled] = header.version_tokens[0][0]
    elif header.version_tokens:
        runs = np.array(header.version_tokens, np.int32)
        versions[sampled] = np.repeat(runs[:, 0], runs[:, 1])
    return Trajectory(
        token_ids=_writable(arrays["token_ids"]),
        loss_mask=_writable(mask),
        behavior_logprobs=_writable(arrays["behavior_logprobs"]),
        policy_versions=versions,
        reward=reward,
        rewards=rewards,
        finish_reason=finish_reason,
    )


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """An array out of a frame of its own is still a view of the received bytes."""
    return array if array.flags.writeable else array.copy()


def check_stored(header: GroupHeader, stored: StoredGroup, vocabulary: int) -> None:
    """What the learner will rely on, found out at the door: the arrays agree with the header that the gates judge, and
    every value is one that can be trained on. Nothing is copied or kept.

    Args:
        vocabulary: token ids are below it.

    Raises:
        WireError: names what is wrong.
    """
    decode_texts(stored.texts)
    for trajectory, blob, own in zip(header.trajectories, stored.blobs, stored.large, strict=True):
        _parse(trajectory, blob, own, vocabulary)


def _parse(
    header: TrajectoryHeader, view: memoryview, own: Sequence[Frame], vocabulary: int
) -> tuple[dict[str, NDArray[Any]], str, float, dict[str, float]]:
    """`(arrays by name, as views of `view` and `own`; finish_reason; reward; named rewards)`, all checked."""
    if len(view) < _ALIGN:
        raise WireError(f"a trajectory of {len(view)} bytes is too short")
    size = int.from_bytes(view[:4], "little")
    if size > len(view) - 4:
        raise WireError(f"a manifest of {size} bytes does not fit in a trajectory of {len(view)}")
    start = (4 + size + _ALIGN - 1) // _ALIGN * _ALIGN
    described, finish_reason, reward, rewards = wire.sequence(wire.unpack(view[4 : 4 + size]), "manifest", 4)
    rows = wire.sequence(described, "arrays", len(ARRAYS))
    arrays = dict(_decode_array(row, view[start:], own, header.length) for row in rows)
    if arrays.keys() != ARRAYS.keys():
        raise WireError(f"a trajectory has the arrays {sorted(ARRAYS)}, not {sorted(arrays)}")
    if np.maximum.reduce(arrays["loss_mask"]) > 1:
        raise WireError("loss_mask must be 0 or 1")
    mask = arrays["loss_mask"] = arrays["loss_mask"].view(np.bool_)
    loss_tokens, announced = int(np.count_nonzero(mask)), header.loss_tokens
    if loss_tokens != announced:
        raise WireError(f"{loss_tokens} loss tokens came, the header announced {announced}")
    if (int(mask.argmax()) if loss_tokens else header.length) != header.prompt_length:
        raise WireError("the loss mask does not begin where the header says the prompt ends")
    _check_values(arrays["token_ids"], arrays["behavior_logprobs"], mask, vocabulary)
    if wire.number(reward, "reward") != header.reward:
        raise WireError(f"the reward is {reward}, the header the group was judged by says {header.reward}")
    named = wire.mapping(rewards, "rewards")
    named = {name: wire.number(value, f"rewards[{name!r}]") for name, value in named.items()}
    return arrays, wire.text(finish_reason, "finish_reason", wire.MAX_NAME), float(reward), named


def _decode_array(row: Any, inline: memoryview, own: Sequence[Frame], length: int) -> tuple[str, NDArray[Any]]:
    name, dtype, count, place = wire.sequence(row, "array", 4)
    if type(name) is not str or name not in ARRAYS or dtype != ARRAYS[name]:
        raise WireError(f"array {wire.short(name)} of dtype {wire.short(dtype)} is not one of {ARRAYS}")
    wire.integer(count, "array length", length, length)
    wire.integer(place, "array place", -len(own), len(inline))
    nbytes = count * DTYPES[dtype].itemsize
    source = memoryview(own[-1 - place]) if place < 0 else inline[place : place + nbytes]
    if len(source) != nbytes:
        raise WireError(f"{name} needs {nbytes} bytes, {len(source)} came")
    return name, np.frombuffer(source, DTYPES[dtype])


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
