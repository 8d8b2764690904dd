from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import WeightsError
from asyncrl.weights.boxes import Box, Split, box_of, volume, whole
from asyncrl.weights.manifest import Manifest, build_manifest
from asyncrl.weights.shares import Shares, divide

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
def held_models(draw: st.DrawFn) -> tuple[Manifest, dict[str, list[Box]], int]:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=5))
    held, senders = draw(layouts(shapes))
    dtypes = [draw(st.sampled_from([torch.bfloat16, torch.float32, torch.int64])) for _ in shapes]
    rows = [(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]
    return build_manifest(rows, 256), {row[0]: boxes for row, boxes in zip(rows, held, strict=True)}, senders


def loads(shares: Shares) -> list[int]:
    return [sum(entry.nbytes for entry in share.manifest.entries) for share in shares.of]


def least_possible(manifest: Manifest, held: dict[str, list[Box]], senders: int) -> float:
    """Of the largest load, if bytes could be divided at will: no set of senders can send less than what it alone holds
    (and by the theorem of Hall, no more is needed)."""
    only: dict[frozenset[int], int] = defaultdict(int)
    for entry in manifest.entries:
        for box in {box for box in held[entry.name] if volume(box)}:
            owners = frozenset(i for i, other in enumerate(held[entry.name]) if other == box)
            only[owners] += volume(box) * entry.dtype.itemsize
    sets = [frozenset(s) for r in range(1, senders + 1) for s in itertools.combinations(range(senders), r)]
    return max((sum(n for owners, n in only.items() if owners <= s) / len(s) for s in sets), default=0.0)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(held_models())
def test_the_load_is_as_equal_as_what_the_senders_hold_allows(case):
    manifest, held, senders = case
    if senders > 9:
        return
    rows = [volume(held[e.name][0]) and max(volume(whole(e.shape[1:])), 1) * e.dtype.itemsize for e in manifest.entries]
    sets = {tuple(i for i, other in enumerate(boxes) if other == box) for boxes in held.values() for box in boxes}
    largest = max(loads(divide(manifest, held, senders, 256)))
    assert largest <= 1.01 * least_possible(manifest, held, senders) + len(sets) * max(rows) + 1


def test_what_all_ranks_hold_is_divided_evenly_and_between_rows():
    rows = [(str(i), shape, torch.float32) for i, shape in enumerate([(1000, 8), (333, 8), (7,), ()])]
    manifest = build_manifest(rows, 1 << 20)
    shares = divide(manifest, {name: [whole(shape)] * 4 for name, shape, _ in rows}, 4, 1 << 20)
    found = loads(shares)
    assert max(found) - min(found) <= 8 * 4 and sum(found) == sum(volume(whole(shape)) * 4 for _, shape, _ in rows)
    assert all(box[1] == (0, 8) for share in shares.of for box in share.boxes.values() if len(box) == 2)


def test_two_copies_of_a_sharded_model_send_half_of_each_shard():
    shards = [box_of((64, 16), [Split(dim=0, parts=2, index=i)]) for i in (0, 1, 0, 1)]
    manifest = build_manifest([("w", (64, 16), torch.bfloat16)], 1 << 20)
    assert loads(divide(manifest, {"w": shards}, 4, 1 << 20)) == [512] * 4


def test_chunks_are_those_of_torch():
    assert [box_of((7, 3), [Split(dim=0, parts=4, index=i)])[0] for i in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert [volume(box_of((1,), [Split(dim=0, parts=3, index=i)])) for i in range(3)] == [1, 0, 0]
    # FSDP over TP: rows of the TP shard are cut again
    both = [Split(dim=0, parts=2, index=1), Split(dim=0, parts=2, index=0)]
    assert box_of((8, 2), both) == ((4, 6), (0, 2))


def test_what_nobody_holds_and_boxes_that_cross_are_refused():
    manifest = build_manifest([("w", (4,), torch.float32)], 1 << 20)
    with pytest.raises(WeightsError, match=r"of w they hold .* which lack 2 elements. Use weights.senders=rank0"):
        divide(manifest, {"w": [((0, 2),)]}, 1, 1 << 20)
    with pytest.raises(WeightsError, match="overlap in part"):
        divide(manifest, {"w": [((0, 3),), ((2, 4),)]}, 2, 1 << 20)
