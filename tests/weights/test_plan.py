"""Which bytes go to which receiver, cut from the model."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import WeightsError
from asyncrl.weights import plan as plan_module
from asyncrl.weights.boxes import Box, Split, box_of, chopped, coalesced, contains, overlap, slices, volume, whole
from asyncrl.weights.manifest import Manifest, build_manifest
from asyncrl.weights.plan import SendPlan
from asyncrl.weights.sliced import wanted_from_wire, wanted_to_wire

SHAPES = st.lists(st.integers(0, 13), min_size=0, max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn, shapes: list[tuple[int, ...]]) -> tuple[list[list[Box]], int]:
    """Boxes of every process of a mesh (copies x FSDP x TP x EP) of every tensor; a tensor is cut along any of them, in
    any order, or not at all: buffers and norms are in every process."""
    mesh = [draw(st.integers(1, 3)) for _ in range(3)]
    places = list(itertools.product(*map(range, mesh)))
    held = []
    for shape in shapes:
        cut_along = draw(st.permutations(range(3))) if shape else []
        dims = {axis: draw(st.sampled_from([None, *range(len(shape))])) for axis in cut_along}
        held.append([
            box_of(shape, [
                Split(dim=dim, parts=mesh[axis], index=place[axis]) for axis in cut_along
                if (dim := dims[axis]) is not None
            ])
            for place in places
        ])  # fmt: skip
    return held, len(places)


@st.composite
def models(draw: st.DrawFn) -> tuple[Manifest, list[dict[str, tuple[Box, ...]]]]:
    """A model, and receivers of engines that are cut in any way, or not at all."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=5))
    dtypes = [draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64])) for _ in shapes]
    rows = [
        (f"layers.{i // 2}.t{i}", shape, dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    manifest = build_manifest(rows, draw(st.sampled_from([64, 512])))
    wanted: list[dict[str, tuple[Box, ...]]] = []
    for _ in range(draw(st.integers(1, 2))):
        needed, width = draw(layouts(shapes))
        for process in range(width):
            boxes = {name: tuple(b for b in (needed[i][process],) if volume(b)) for i, (name, _, _) in enumerate(rows)}
            some = draw(st.sets(st.sampled_from([name for name, _, _ in rows])))
            wanted.append({name: boxes[name] for name in some})
    return manifest, wanted


@settings(max_examples=60, deadline=None, derandomize=True)
@given(models(), st.sampled_from([16, 64, 1 << 20]))
def test_every_element_that_a_process_wants_reaches_it_exactly_once_and_no_other_does(model, cap):
    manifest, wanted = model
    planned = SendPlan.of(manifest, wanted, cap)
    read = SendPlan.from_wire(planned.to_wire(), Manifest.from_wire(manifest.to_wire()), len(wanted) + 1)
    assert read == planned
    for rank, want in enumerate(wanted, 1):
        received = read.received(rank)
        for entry in manifest.entries:
            found, expected = np.zeros(entry.shape, int), np.zeros(entry.shape, int)
            for box in received[entry.name]:
                found[slices(box)] += 1
            for box in want.get(entry.name, (whole(entry.shape),)):
                expected[slices(box)] += 1
            assert np.array_equal(found, expected)
        assert read.brings(rank, want)
    for entry in manifest.entries:
        sent = np.zeros(entry.shape, int)
        for name, box in read.parts.values():
            if name == entry.name:
                sent[slices(box)] += 1
        assert sent.max(initial=0) <= 1, "no more than the model is sent"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(models(), st.sampled_from([16, 64]))
def test_buckets_are_not_too_large_and_cut_from_the_models_buckets_in_their_order(model, cap):
    manifest, wanted = model
    planned = SendPlan.of(manifest, wanted, cap)
    source = {entry.name: number for number, bucket in enumerate(manifest.buckets) for entry in bucket.entries}
    largest = max([bucket.nbytes for bucket in manifest.buckets], default=0)
    sources = []
    for bucket in planned.manifest.buckets:
        of = {source[planned.parts[entry.name][0]] for entry in bucket.entries}
        assert len(of) == 1, "a bucket is sent as soon as the one that it is cut from is there"
        sources += of
        if len(planned.lanes) > 1:
            assert bucket.nbytes <= max(cap + 16 * len(bucket.entries), largest)
    assert sources == sorted(sources)


def halves(manifest: Manifest, dim: int = 0) -> list[dict[str, tuple[Box, ...]]]:
    """Two processes, with half of each tensor of two dimensions."""
    found: list[dict[str, tuple[Box, ...]]] = [{}, {}]
    for entry in manifest.entries:
        if len(entry.shape) == 2:
            box, size = list(whole(entry.shape)), entry.shape[dim]
            for i, want in enumerate(found):
                box[dim] = (i * size // 2, (i + 1) * size // 2)
                want[entry.name] = (tuple(box),)
    return found


def test_each_process_of_two_receives_half_of_what_is_cut_and_the_sender_sends_the_model_once():
    rows = [(f"layers.{i}.{name}", shape, torch.bfloat16) for i in range(4) for name, shape in
            (("w", (64, 32)), ("norm", (32,)))]  # fmt: skip
    manifest = build_manifest(rows, 1 << 14)
    planned = SendPlan.of(manifest, [*halves(manifest, 0), *halves(manifest, 0), {}], 1 << 20)
    assert planned.lanes == ((1, 3, 5), (2, 4, 5), (1, 2, 3, 4, 5))
    nbytes = {rank: sum(sum(map(volume, boxes)) for boxes in planned.received(rank).values()) for rank in range(1, 6)}
    assert nbytes == {1: 4 * 1056, 2: 4 * 1056, 3: 4 * 1056, 4: 4 * 1056, 5: 4 * 2080}
    assert planned.manifest.nbytes == manifest.nbytes
    assert not SendPlan.of(manifest, [{}, {}], 1 << 20).cuts


def test_a_large_tensor_is_sent_to_its_lanes_in_turns_so_that_none_waits_for_all_of_it():
    manifest = build_manifest([("embed", (1024, 64), torch.float32)], 1 << 14)
    planned = SendPlan.of(manifest, halves(manifest), 1 << 14)
    assert list(planned.bucket_lanes) == [0, 1] * 8
    assert {bucket.nbytes for bucket in planned.manifest.buckets} == {1 << 14}


def test_with_too_many_kinds_of_receivers_all_get_the_whole_model(monkeypatch):
    manifest = build_manifest([("w", (8, 8), torch.float32)], 1 << 14)
    monkeypatch.setattr(plan_module, "MAX_LANES", 1)
    planned = SendPlan.of(manifest, halves(manifest), 1 << 14)
    assert planned.lanes == ((1, 2),) and planned.brings(1, {})


def test_chunks_are_those_of_torch():
    assert [box_of((7, 3), [Split(dim=0, parts=4, index=i)])[0] for i in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert [volume(box_of((1,), [Split(dim=0, parts=3, index=i)])) for i in range(3)] == [1, 0, 0]
    # FSDP over TP: rows of the TP shard are cut again
    both = [Split(dim=0, parts=2, index=1), Split(dim=0, parts=2, index=0)]
    assert box_of((8, 2), both) == ((4, 6), (0, 2))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted).map(tuple), min_size=2, max_size=2)
                .map(tuple), max_size=8))  # fmt: skip
def test_boxes_that_touch_or_cross_become_one(boxes):
    found = coalesced(boxes)
    assert not overlap(found)
    for box in boxes:
        assert not volume(box) or any(contains(each, box) for each in found)
    assert coalesced(found) == found


def test_of_fused_experts_the_same_rows_of_all_become_two_boxes():
    rows = [((e, e + 1), (start, start + 4), (0, 8)) for e in range(5) for start in (0, 16)]
    assert coalesced(rows) == (((0, 5), (0, 4), (0, 8)), ((0, 5), (16, 20), (0, 8)))


@given(st.lists(st.integers(1, 9), max_size=3).map(tuple), st.integers(1, 20))
def test_a_chopped_box_is_put_together_from_parts_that_are_small_enough(shape, elements):
    parts = chopped(whole(shape), elements)
    assert sum(map(volume, parts)) == volume(whole(shape)) and not overlap(parts)
    assert all(volume(part) <= elements for part in parts)


@pytest.mark.parametrize(
    ("wire", "match"),
    [
        ([["w", [[0, 4], [2, 6]]]], "not parts of a tensor"),
        ([["w", [[4, 4]]]], "not parts of a tensor"),
        ([["w", [[-1, 4]]]], "not parts of a tensor"),
        ([["w", [[0, 4, 1]]]], "zip"),
    ],
)
def test_what_an_engine_wants_has_to_be_parts_of_tensors(wire: Any, match):
    with pytest.raises((WeightsError, ValueError), match=match):
        wanted_from_wire(wire)
    good = {"w": (((0, 4), (2, 3)),), "s": ((),), "n": ()}
    assert wanted_from_wire(wanted_to_wire(good)) == good
