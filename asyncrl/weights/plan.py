"""Plans who sends what to whom: a pure function of how the learner holds the tensors and what the engines need of them.

    held:    sender -> box of each tensor      (FSDP, TP, EP, copies: boxes are disjoint, or the same)
    needed:  receiver -> box of each tensor    (whole, or the share of one process of an engine)
    plan:    (sender, box, receivers), so that every element reaches every receiver that needs it exactly once

Parts that several senders hold are divided between them so that their loads are as equal as possible.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""[start, stop) in every dimension of a tensor; () is the whole of a tensor without dimensions."""
_SWEEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One dimension cut into `parts` as by `torch.chunk`, all of one size but the last; `index` selects one of them."""

    dim: int
    parts: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One tensor, and who holds and needs which boxes of it."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    held: tuple[Box | None, ...]
    """Box held by each sender; None if it holds nothing of the tensor."""
    needed: tuple[tuple[Box, ...], ...]
    """Disjoint boxes needed by each receiver; empty if it needs nothing of the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    sender: int
    receivers: tuple[int, ...]
    tensor: int
    """Index of the tensor in the planned sequence."""
    box: Box


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """Number of elements in the box."""
    return math.prod(max(stop - start, 0) for start, stop in box)


def box_of(shape: Sequence[int], splits: Iterable[Split]) -> Box:
    """The box of a tensor of `shape` that remains after the splits are applied in order; empty if there are more shards
    than rows."""
    box = list(whole(shape))
    for split in splits:
        start, stop = box[split.dim]
        each = -(-(stop - start) // split.parts)
        first = min(start + split.index * each, stop)
        box[split.dim] = first, min(first + each, stop)
    return tuple(box)


def intersection(one: Box, other: Box) -> Box:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def contains(outer: Box, inner: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def within(outer: Box, inner: Box) -> Box:
    """`inner` in coordinates relative to the start of `outer`, which contains it."""
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(inner, outer, strict=True))


def chopped(box: Box, elements: int) -> list[Box]:
    """Cut a box into parts of at most `elements` elements, in order, as far as whole rows of the first dimensions
    allow."""
    dim = next((i for i, (start, stop) in enumerate(box) if stop - start > 1), None)
    if dim is None or volume(box) <= elements:
        return [box]
    start, stop = box[dim]
    row = volume(box) // (stop - start)
    step = max(1, elements // row)
    rows = [(first, min(first + step, stop)) for first in range(start, stop, step)]
    parts = [(*box[:dim], ends, *box[dim + 1 :]) for ends in rows]
    return [each for part in parts for each in chopped(part, elements)]


def coalesced(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Return disjoint boxes such that each of `boxes` lies in one of them: boxes that together form a box are merged,
    and boxes that overlap are replaced by their bounding box."""
    found: list[Box] = []
    for box in sorted(boxes):
        if not volume(box):
            continue
        while (other := next((each for each in reversed(found) if _join(each, box)), None)) is not None:
            found.remove(other)
            box = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(other, box, strict=True))
        found.append(box)
    return tuple(sorted(found))


def _join(one: Box, other: Box) -> bool:
    """Whether the two overlap, or together form one box."""
    apart = [dim for dim, (ends, others) in enumerate(zip(one, other, strict=True)) if ends != others]
    if len(apart) == 1:
        (a, b), (c, d) = one[apart[0]], other[apart[0]]
        return max(a, c) <= min(b, d)
    return volume(intersection(one, other)) > 0


def overlap(boxes: Iterable[Box]) -> bool:
    """Whether any two of the boxes have an element in common."""
    ordered, end = sorted(boxes), 0
    for i, box in enumerate(ordered):
        if not box:
            return len(ordered) > 1
        if box[0][0] < end and any(volume(intersection(box, other)) for other in ordered[:i]):
            return True
        end = max(end, box[0][1])
    return False


def plan_transfers(tensors: Sequence[Placed]) -> list[Transfer]:
    """Plan every element that a receiver needs, from one sender that holds it. A sender has at most one box of a tensor
    for the same receivers, unless these need partly overlapping parts of it.

    Raises:
        ValueError: a needed element is held by nobody, or senders hold boxes that overlap in part.
    """
    pieces: dict[tuple[int, ...], list[tuple[int, tuple[int, ...], Box]]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        cells = _cells(tensor)
        for region, receivers in regions(tensor.shape, tensor.needed):
            parts = [(owners, intersection(box, region)) for box, owners in cells.items()]
            found = sum(volume(part) for _, part in parts)
            if found != volume(region):
                raise ValueError(f"{tensor.name}: {volume(region) - found} elements of {region} are held by no sender")
            for owners, part in parts:
                if volume(part):
                    pieces[owners].append((number, receivers, part))
    nbytes = {
        owners: sum(volume(box) * tensors[number].itemsize for number, _, box in found)
        for owners, found in pieces.items()
    }
    shares = _shares(nbytes, max((len(tensor.held) for tensor in tensors), default=0))
    transfers = []
    for owners, found in pieces.items():
        quotas = [shares[owners][owner] for owner in owners]
        sizes = [tensors[number].itemsize for number, _, _ in found]
        for position, owner, box in _dealt([box for _, _, box in found], sizes, quotas):
            number, receivers, _ = found[position]
            transfers.append(Transfer(sender=owners[owner], receivers=receivers, tensor=number, box=box))
    return sorted(transfers, key=lambda each: (each.tensor, each.box, each.sender))


def _cells(tensor: Placed) -> dict[Box, tuple[int, ...]]:
    """Each held box, with the senders that hold it."""
    owners: dict[Box, list[int]] = defaultdict(list)
    for sender, box in enumerate(tensor.held):
        if box is not None and volume(box):
            owners[box].append(sender)
    if overlap(owners):
        raise ValueError(f"{tensor.name}: senders hold boxes that overlap in part: {sorted(owners)}")
    return {box: tuple(found) for box, found in owners.items()}


def regions(shape: Sequence[int], needed: Sequence[Sequence[Box]]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yield disjoint boxes of a tensor, in order, each with the receivers that need it.

    Args:
        needed: disjoint boxes by receiver.
    """
    wanted = [tuple(box for box in boxes if volume(box)) for boxes in needed]
    distinct = {box for boxes in wanted for box in boxes}
    if len(distinct) == 1:
        yield next(iter(distinct)), tuple(i for i, boxes in enumerate(wanted) if boxes)
        return
    cuts = [sorted({end for box in distinct for end in box[dim]}) for dim in range(len(shape))]
    for cell in itertools.product(*(itertools.pairwise(points) for points in cuts)) if distinct else ():
        receivers = tuple(i for i, boxes in enumerate(wanted) if any(contains(box, cell) for box in boxes))
        if receivers:
            yield cell, receivers


def _shares(nbytes: Mapping[tuple[int, ...], int], senders: int) -> dict[tuple[int, ...], dict[int, float]]:
    """How many bytes each owner sends of what a set of owners holds, such that the largest load is minimal.

    The sets are levelled one after another, repeatedly: descent on the sum of squared loads, which is convex.
    """
    loads = [0.0] * senders
    shares = {owners: dict.fromkeys(owners, 0.0) for owners in nbytes}
    for _ in range(_SWEEPS):
        moved = 0.0
        for owners, total in nbytes.items():
            others = {owner: loads[owner] - shares[owners][owner] for owner in owners}
            level = _level(sorted(others.values()), total)
            for owner in owners:
                share = max(level - others[owner], 0.0)
                moved += abs(share - shares[owners][owner])
                shares[owners][owner], loads[owner] = share, others[owner] + share
        if moved < 1.0:
            break
    return shares


def _level(heights: Sequence[float], amount: float) -> float:
    """Height that `amount` reaches when poured into connected vessels already filled to ascending `heights`."""
    filled = 0.0
    for count, height in enumerate(heights, 1):
        filled += height
        level = (amount + filled) / count
        if count == len(heights) or level <= heights[count]:
            return level
    return 0.0


def _dealt(boxes: Sequence[Box], sizes: Sequence[int], quotas: Sequence[float]) -> Iterator[tuple[int, int, Box]]:
    """Yield (index of the box, index of the owner, its part): fills the owners' quotas in order, cutting between
    rows."""
    ends = list(itertools.accumulate(quotas))
    owner, done = 0, 0.0
    for position, (box, size) in enumerate(zip(boxes, sizes, strict=True)):
        dim = next((i for i, (start, stop) in enumerate(box) if stop - start > 1), None)
        start, stop = box[dim] if dim is not None else (0, 1)
        row = volume(box) * size / (stop - start)
        while start < stop:
            take = min(stop - start, round((ends[owner] - done) / row))
            if owner == len(ends) - 1:
                take = stop - start
            if take > 0:
                part = box if dim is None else (*box[:dim], (start, start + take), *box[dim + 1 :])
                yield position, owner, part
                start, done = start + take, done + take * row
            if start < stop:
                owner += 1
