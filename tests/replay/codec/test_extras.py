"""Arrays that an environment attaches reach the learner byte for byte, without being read on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from asyncrl import recorded, types
from asyncrl.errors import WireError
from asyncrl.replay.codec import headers, wire
from asyncrl.replay.codec.columns import LARGE_ARRAY
from asyncrl.replay.codec.group import check_stored, encode_group, split_frames
from asyncrl.replay.codec.lease import Unpacking, pack_places
from asyncrl.replay.core.durable.events import Inserted
from asyncrl.replay.journal.records import decode_event, encode_event
from asyncrl.types import NO_VERSION, Assignment, GroupHeader, StepPlan, TrajectoryGroup
from tests.replay.helpers import group, same_trajectory, trajectory

ORDER = Assignment(group_id=0, prompt_index=0, attempt=0, seed=5, policy_version=0)
VOCABULARY = 1 << 20


def with_extras(*extras: Mapping[str, Any], versions: tuple[int, ...] = (0, 0, 0)) -> TrajectoryGroup:
    """A group of as many trajectories."""
    made = tuple(replace(trajectory(list(versions)), extras=each) for each in extras)
    return replace(group(ORDER, [0]), trajectories=made)


def on_the_wire(made: TrajectoryGroup) -> tuple[GroupHeader, list[bytes]]:
    encoded = encode_group(made)
    header = headers.decode_group_header(wire.unpack(wire.pack(headers.encode_group_header(encoded.header))))
    assert header == encoded.header
    return header, [bytes(frame) for frame in encoded.frames]


def plan_of(header: GroupHeader, *shards: tuple[tuple[int, int], ...]) -> StepPlan:
    return StepPlan(step=0, policy_version=0, groups=(header,), staleness={0: 0}, max_staleness=0, shards=shards)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Any bytes of any dtype and shape; now and then a large one, and one that does not lie as it is sent."""
    dtype = np.dtype(draw(st.sampled_from(sorted(wire.EXTRA_DTYPES))))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    if draw(st.integers(0, 9)) == 0:
        shape = (draw(st.integers(LARGE_ARRAY // dtype.itemsize - 1, LARGE_ARRAY // dtype.itemsize + 1)),)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    raw = rng.integers(0, 2 if dtype.kind == "b" else 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    array = raw.view(dtype).reshape(shape)
    how = draw(st.sampled_from(("plain", "transposed", "reversed", "big-endian")))
    if how == "big-endian":
        return array.astype(dtype.newbyteorder(">"))
    return {"plain": array, "transposed": array.T, "reversed": array[::-1] if shape else array}[how]


OURS = {types.REF_LOGPROBS, *recorded.SUPPORT, types.TOPK_IDS, types.TOPK_LOGPROBS, types.ROUTED_EXPERTS}
"""Looked at on the way. Hypothesis draws them too: it takes texts out of the modules that it runs."""
NAMES = st.text(min_size=1, max_size=64).filter(lambda name: name.isprintable() and name not in OURS)
EXTRAS = st.dictionaries(NAMES, arrays(), max_size=4)


@hypothesis_settings(max_examples=60, deadline=None)
@given(extras=st.lists(EXTRAS, min_size=1, max_size=4), tokens=st.sampled_from((3, LARGE_ARRAY // 4)), data=st.data())
def test_extras_arrive_byte_for_byte_by_wire_journal_and_lease(extras, tokens, data) -> None:
    made = with_extras(*extras, versions=(0,) * tokens)
    header, frames = on_the_wire(made)
    stored = split_frames(header, frames)
    check_stored(header, stored, VOCABULARY)
    expected = [replace(t, extras={name: little(x) for name, x in t.extras.items()}) for t in made.trajectories]
    assert all(map(same_trajectory, expected, stored.trajectories(header.trajectories)))

    event = Inserted(header, stored)
    recovered = decode_event(b"".join(encode_event(event)))
    assert recovered.header == header and recovered.payload == stored

    places = data.draw(st.permutations([(0, t) for t in range(len(extras))]))
    cut = data.draw(st.integers(0, len(places)))
    plan = plan_of(header, tuple(places[:cut]), tuple(places[cut:]))
    for rank, samples in ((0, [0]), (1, [])):
        parcel, sent = pack_places({0: [recovered.payload]}, set(plan.shards[rank]), samples)
        unpacking = Unpacking(plan)
        # A message lies wherever the one before it in the socket's buffer ended.
        unpacking.open(wire.unpack(wire.pack(parcel)), [memoryview(b"x" + bytes(frame))[1:] for frame in sent])
        found = unpacking.lease(rank).trajectories
        assert tuple(found) == plan.shards[rank]
        assert all(same_trajectory(expected[t], arrived) for (_, t), arrived in found.items())
        for array in (array for arrived in found.values() for array in arrived.extras.values()):
            assert array.flags.aligned and not array.flags.writeable


def little(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("<"))


def test_a_large_array_is_neither_copied_nor_joined() -> None:
    image = np.zeros((3, LARGE_ARRAY), np.uint8)
    small = np.arange(5, dtype=np.float16)
    encoded = encode_group(with_extras({"image": image, "small": small}, {}))
    assert [len(frame) for frame in encoded.frames[2:]] == [16, image.nbytes]
    assert np.shares_memory(np.frombuffer(encoded.frames[3], np.uint8), image)
    frames = [bytes(frame) for frame in encoded.frames]
    stored = split_frames(encoded.header, frames)
    assert stored.side is not None and stored.side.own[0] is frames[3]
    _, sent = pack_places({0: [stored]}, [(0, 0), (0, 1)], [])
    assert any(frame is frames[3] for frame in sent)


def test_small_arrays_that_are_many_do_not_lie_in_the_joined_frame() -> None:
    made = with_extras({}, {f"part {n}": np.full(LARGE_ARRAY // 8, n, np.uint8) for n in range(9)}, {"x": np.ones(1)})
    header, frames = on_the_wire(made)
    assert [len(frame) for frame in frames[2:]] == [8, 9 * LARGE_ARRAY // 8]
    found = split_frames(header, frames).trajectories(header.trajectories)
    assert all(map(same_trajectory, made.trajectories, found))


def test_an_array_is_not_copied_out_of_a_frame_that_lies_well() -> None:
    mask = np.array([False, False, True, False, True])
    versions = np.where(mask, 0, NO_VERSION).astype(np.int32)
    odd = replace(trajectory([0, 0, 0]), loss_mask=mask, policy_versions=versions, extras={"x": np.arange(3.0)})
    header, frames = on_the_wire(replace(group(ORDER, [0]), trajectories=(odd,)))
    parcel, sent = pack_places({0: [split_frames(header, frames)]}, [(0, 0)], [])
    arrived = [np.frombuffer(bytes(frame), np.uint8) for frame in sent]
    unpacking = Unpacking(plan_of(header, ((0, 0),)))
    unpacking.open(parcel, [frame.data for frame in arrived])
    (found,) = unpacking.lease(0).trajectories.values()
    assert same_trajectory(odd, found)
    assert any(np.shares_memory(found.extras["x"], frame) for frame in arrived)


def test_a_group_without_extras_has_no_frame_for_them() -> None:
    encoded = encode_group(with_extras({}, {}))
    assert len(encoded.frames) == 2
    with pytest.raises(WireError, match=r"but .* arrived"):
        split_frames(replace(encoded.header, nbytes=encoded.header.nbytes + 8), [*encoded.frames, bytes(8)])


@pytest.mark.parametrize(
    ("extras", "complaint"),
    [
        ({"x": [1.0, 2.0]}, "'x' must be a numpy array, not list"),
        ({"x": np.array(["a"])}, r"'x' has dtype '<U1'; the dtypes that can be sent are \|b1.*bfloat16"),
        ({"x": np.zeros(2, "V2")}, "has dtype"),
        ({"x": np.array([object()])}, r"has dtype '\|O'"),
        ({"x": np.zeros(2, np.complex64)}, "has dtype '<c8'"),
        ({"x": np.zeros(2, [("a", "<f4")])}, "has dtype"),
        ({"x": np.zeros(2, "M8[s]")}, "has dtype"),
        ({"x": np.zeros((1,) * 9)}, "shape of extra 'x' must be a list of at most 8"),
        ({"x": np.broadcast_to(np.uint8(1), ((1 << 30) + 1,))}, "dimension must be an integer"),
        ({"": np.zeros(2)}, "name of 1 to 64 printable characters"),
        ({"\ud800": np.zeros(2)}, "name of 1 to 64 printable characters"),
        ({"x" * 65: np.zeros(2)}, "at most 64 characters"),
        ({7: np.zeros(2)}, "name of an extra must be a string"),
        ({f"x{n}": np.zeros(1) for n in range(65)}, "at most 64 items"),
    ],
)
def test_extras_that_cannot_be_sent_are_refused_with_the_rule(extras, complaint) -> None:
    with pytest.raises(WireError, match=complaint):
        encode_group(with_extras(extras))


@pytest.mark.parametrize("nothing", range(4))
def test_a_dimension_of_zero_hides_no_shape_that_numpy_cannot_make_at_the_learner(nothing) -> None:
    shape = [1 << 30] * 4
    shape[nothing] = 0
    with pytest.raises(WireError, match=r"spans 9903520314283042199192993792 bytes, which exceeds the limit"):
        wire.decode_extra_headers([["x", "<f8", shape]])
    (fits,) = wire.decode_extra_headers([["x", "<f8", [0, 1 << 27]]])
    assert np.ndarray(fits.shape, fits.dtype, b"").size == 0


def test_a_group_that_no_journal_record_could_hold_is_refused_by_either_side() -> None:
    huge = np.broadcast_to(np.uint8(1), (1 << 30,))
    with pytest.raises(WireError, match=r"a group of 4294967296 bytes exceeds .* rollout.group_size"):
        encode_group(with_extras(*[{"x": huge}] * 4))
    header, frames = on_the_wire(with_extras({"x": np.arange(3)}))
    with pytest.raises(WireError, match="exceeds the limit of"):
        split_frames(replace(header, nbytes=1 << 32), frames)


def test_frames_of_other_sizes_than_the_header_announces_are_refused() -> None:
    made = with_extras({"image": np.zeros(LARGE_ARRAY, np.uint8), "x": np.arange(3)}, {"x": np.arange(4)})
    header, frames = on_the_wire(made)
    joined, own = frames[2:]
    first, second = header.trajectories
    longer = replace(first, extras=(first.extras[0], replace(first.extras[1], shape=(5,))))
    other = replace(second, extras=(replace(second.extras[0], dtype="<i2"),))
    headers = [header, replace(header, trajectories=(longer, second)), replace(header, trajectories=(first, other))]
    cases = [
        (header, []), (header, [joined]), (header, [own, joined]), (header, [joined, own, b""]),
        (header, [joined[:-8], own]), (header, [joined, own[:-1]]), (header, [joined + own]),
        *((lie, [joined, own]) for lie in headers[1:]),
    ]  # fmt: skip
    for announced, side in cases:
        came = [*frames[:2], *side]
        with pytest.raises(WireError):
            split_frames(replace(announced, nbytes=sum(map(len, came))), came)
    split_frames(header, frames)


def test_a_lease_without_the_extras_that_its_plan_announces_is_refused() -> None:
    header, frames = on_the_wire(with_extras({"x": np.arange(3)}, {}))
    stored = split_frames(header, frames)
    parcel, sent = pack_places({0: [stored]}, [(0, 0), (0, 1)], [])
    unpacking = Unpacking(plan_of(header, ((0, 0), (0, 1))))
    unpacking.open([parcel[0], [], parcel[2]], sent)
    with pytest.raises(WireError, match=r"lacks the trajectories \[\(0, 0\)\]"):
        unpacking.lease(0)
