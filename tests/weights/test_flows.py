"""Which bytes go to which receiver, cut from what the senders hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import WeightsError
from asyncrl.weights import flows as flows_module
from asyncrl.weights.boxes import Box, chopped, coalesced, contains, overlap, volume, whole
from asyncrl.weights.flows import Flows, all_of, cut, flows_of
from asyncrl.weights.manifest import Manifest, build_manifest
from asyncrl.weights.shares import Shares, divide, slices
from asyncrl.weights.sliced import wanted_from_wire, wanted_to_wire
from tests.weights.test_shares import SHAPES, layouts


@st.composite
def models(draw: st.DrawFn) -> tuple[Manifest, Shares, list[dict[str, tuple[Box, ...]]]]:
    """A model, one or several senders of it, and receivers of engines that are cut in any way, or not at all."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=5))
    dtypes = [draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64])) for _ in shapes]
    rows = [
        (f"layers.{i // 2}.t{i}", shape, dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    manifest = build_manifest(rows, draw(st.sampled_from([64, 512])))
    shares = all_of(manifest)
    if draw(st.booleans()):
        held, senders = draw(layouts(shapes))
        shares = divide(manifest, {row[0]: held[i] for i, row in enumerate(rows)}, senders, 256)
    wanted: list[dict[str, tuple[Box, ...]]] = []
    for _ in range(draw(st.integers(1, 2))):
        needed, width = draw(layouts(shapes))
        for process in range(width):
            boxes = {name: tuple(b for b in (needed[i][process],) if volume(b)) for i, (name, _, _) in enumerate(rows)}
            some = draw(st.sets(st.sampled_from([name for name, _, _ in rows])))
            wanted.append({name: boxes[name] for name in some})
    return manifest, shares, wanted


@settings(max_examples=60, deadline=None, derandomize=True)
@given(models(), st.sampled_from([16, 64, 1 << 20]))
def test_every_element_that_a_process_wants_reaches_it_exactly_once_and_no_other_does(model, cap):
    manifest, shares, wanted = model
    planned = cut(shares, wanted, cap)
    read = Flows.from_wire(planned.to_wire(), Manifest.from_wire(manifest.to_wire()))
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
    sent = np.zeros(0, int)
    for entry in manifest.entries:
        sent = np.zeros(entry.shape, int)
        for flow in read.of:
            for name, box in flow.parts.values():
                if name == entry.name:
                    sent[slices(box)] += 1
        assert sent.max(initial=0) <= 1, "all senders together send no more than the model"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(models(), st.sampled_from([16, 64]))
def test_a_sender_sends_what_it_holds_in_buckets_that_are_not_too_large(model, cap):
    _, shares, wanted = model
    planned = cut(shares, wanted, cap)
    for share, flow in zip(shares.of, planned.of, strict=True):
        assert all(contains(share.boxes[name], box) for name, box in flow.parts.values())
        if len(planned.lanes) > 1:
            largest = max([bucket.nbytes for bucket in share.manifest.buckets], default=0)
            assert all(
                bucket.nbytes <= max(cap + 16 * len(bucket.entries), largest) for bucket in flow.manifest.buckets
            )


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
    planned = flows_of(manifest, None, [*halves(manifest, 0), *halves(manifest, 0), {}], 1 << 20)
    assert planned is not None
    assert planned.lanes == ((1, 3, 5), (2, 4, 5), (1, 2, 3, 4, 5))
    nbytes = {rank: sum(sum(map(volume, boxes)) for boxes in planned.received(rank).values()) for rank in range(1, 6)}
    assert nbytes == {1: 4 * 1056, 2: 4 * 1056, 3: 4 * 1056, 4: 4 * 1056, 5: 4 * 2080}
    assert planned.of[0].manifest.nbytes == manifest.nbytes
    assert flows_of(manifest, None, [{}, {}], 1 << 20) is None


def test_a_large_tensor_is_sent_to_its_lanes_in_turns_so_that_none_waits_for_all_of_it():
    manifest = build_manifest([("embed", (1024, 64), torch.float32)], 1 << 14)
    (flow,) = cut(all_of(manifest), halves(manifest), 1 << 14).of
    assert list(flow.lanes) == [0, 1] * 8
    assert {bucket.nbytes for bucket in flow.manifest.buckets} == {1 << 14}


def test_with_too_many_kinds_of_receivers_all_get_the_whole_model(monkeypatch):
    manifest = build_manifest([("w", (8, 8), torch.float32)], 1 << 14)
    monkeypatch.setattr(flows_module, "MOST_LANES", 1)
    planned = cut(all_of(manifest), halves(manifest), 1 << 14)
    assert planned.lanes == ((1, 2),) and planned.brings(1, {})


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
