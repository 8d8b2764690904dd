from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights.plan import Box, Placed, Split, Transfer, box_of, plan_transfers, volume, whole

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
def placed(draw: st.DrawFn) -> tuple[list[Placed], int]:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=5))
    held, senders = draw(layouts(shapes))
    engines = [draw(layouts(shapes))[0] for _ in range(draw(st.integers(1, 2)))]
    sizes = [draw(st.sampled_from([2, 4, 8])) for _ in shapes]
    tensors = [
        Placed(
            name=f"t{i}", shape=shape, itemsize=sizes[i], held=tuple(held[i]),
            needed=tuple((box,) for engine in engines for box in engine[i]),
        )
        for i, shape in enumerate(shapes)
    ]  # fmt: skip
    return tensors, senders


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in box)


def counts(tensors: list[Placed], transfers: list[Transfer], receiver: int) -> list[np.ndarray]:
    found = [np.zeros(tensor.shape, int) for tensor in tensors]
    for transfer in transfers:
        if receiver in transfer.receivers:
            found[transfer.tensor][slices(transfer.box)] += 1
    return found


def loads(tensors: list[Placed], transfers: list[Transfer], senders: int) -> list[int]:
    found = [0] * senders
    for transfer in transfers:
        found[transfer.sender] += volume(transfer.box) * tensors[transfer.tensor].itemsize
    return found


def least_possible(tensors: list[Placed], senders: int) -> float:
    """Of the largest load, if bytes could be divided at will: no set of senders can send less than what it alone holds
    (and by the theorem of Hall, no more is needed)."""
    only: dict[frozenset[int], int] = defaultdict(int)
    for tensor in tensors:
        of = np.zeros(tensor.shape, int)
        for box in itertools.chain(*tensor.needed):
            of[slices(box)] = 1
        for box in {box for box in tensor.held if box is not None and volume(box)}:
            owners = frozenset(i for i, other in enumerate(tensor.held) if other == box)
            only[owners] += int(of[slices(box)].sum()) * tensor.itemsize
    sets = [frozenset(s) for r in range(1, senders + 1) for s in itertools.combinations(range(senders), r)]
    return max((sum(n for owners, n in only.items() if owners <= s) / len(s) for s in sets), default=0.0)


def check_exactly_once(case: tuple[list[Placed], int]) -> None:
    tensors, _ = case
    transfers = plan_transfers(tensors)
    for transfer in transfers:
        tensor = tensors[transfer.tensor]
        held = tensor.held[transfer.sender]
        assert held is not None and all(a <= c and d <= b for (a, b), (c, d) in zip(held, transfer.box, strict=True))
    for receiver in range(len(tensors[0].needed)):
        for tensor, found in zip(tensors, counts(tensors, transfers, receiver), strict=True):
            expected = np.zeros(tensor.shape, int)
            for needed in tensor.needed[receiver]:
                expected[slices(needed)] = 1
            assert np.array_equal(found, expected)
    assert plan_transfers(tensors) == transfers


@settings(max_examples=25, deadline=None, derandomize=True)
@given(placed())
def test_every_element_reaches_every_process_that_needs_it_exactly_once(case):
    check_exactly_once(case)


@pytest.mark.slow
@pytest.mark.long
@settings(max_examples=1000, deadline=None)
@given(placed())
def test_every_element_reaches_every_process_exactly_once_in_many_layouts(case):
    check_exactly_once(case)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(placed())
def test_the_load_is_as_equal_as_what_the_senders_hold_allows(case):
    tensors, senders = case
    if senders > 9:
        return
    transfers = plan_transfers(tensors)
    rows = [volume(t.held[0] or ()) and max(volume(whole(t.shape[1:])), 1) * t.itemsize for t in tensors]
    sets = len({owners for t in tensors for owners in _owners(t)})
    assert max(loads(tensors, transfers, senders)) <= 1.01 * least_possible(tensors, senders) + sets * max(rows) + 1


def _owners(tensor: Placed) -> set[tuple[int, ...]]:
    return {tuple(i for i, other in enumerate(tensor.held) if other == box) for box in tensor.held}


def test_what_all_ranks_hold_is_divided_evenly_and_between_rows():
    shapes = [(1000, 8), (333, 8), (7,), ()]
    tensors = [
        Placed(name=str(i), shape=s, itemsize=4, held=(whole(s),) * 4, needed=((whole(s),),))
        for i, s in enumerate(shapes)
    ]
    found = loads(tensors, plan_transfers(tensors), 4)
    assert max(found) - min(found) <= 8 * 4 and sum(found) == sum(volume(whole(s)) * 4 for s in shapes)
    assert all(t.box[1] == (0, 8) for t in plan_transfers(tensors) if len(t.box) == 2)


def test_two_copies_of_a_sharded_model_send_half_of_each_shard():
    shape = (64, 16)
    shards = [box_of(shape, [Split(dim=0, parts=2, index=i)]) for i in (0, 1, 0, 1)]
    tensor = Placed(name="w", shape=shape, itemsize=2, held=tuple(shards), needed=((whole(shape),),))
    assert loads([tensor], plan_transfers([tensor]), 4) == [512] * 4


def test_chunks_are_those_of_torch():
    assert [box_of((7, 3), [Split(dim=0, parts=4, index=i)])[0] for i in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert [volume(box_of((1,), [Split(dim=0, parts=3, index=i)])) for i in range(3)] == [1, 0, 0]
    # FSDP over TP: rows of the TP shard are cut again
    both = [Split(dim=0, parts=2, index=1), Split(dim=0, parts=2, index=0)]
    assert box_of((8, 2), both) == ((4, 6), (0, 2))


def test_what_nobody_holds_and_boxes_that_cross_are_refused():
    with pytest.raises(ValueError, match="held by no sender"):
        plan_transfers([Placed(name="w", shape=(4,), itemsize=4, held=(((0, 2),),), needed=((((0, 4),),),))])
    with pytest.raises(ValueError, match="overlap in part"):
        plan_transfers([Placed(name="w", shape=(4,), itemsize=4, held=(((0, 3),), ((2, 4),)), needed=((((0, 4),),),))])
