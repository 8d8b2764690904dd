"""Who sends what to whom: a pure function of how the learner holds the tensors and what the engines need of them.

    held:    sender -> box of each tensor      (FSDP, TP, EP, copies: boxes are disjoint, or the same)
    needed:  receiver -> box of each tensor    (whole, or the share of one process of an engine)
    plan:    (sender, box, receivers), so that every element reaches every receiver that needs it exactly once

What several senders hold is divided between them until their loads are as equal as they can be.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""[start, stop) in every dimension of a tensor; () is all of one without dimensions."""
_SWEEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One dimension cut into `parts` as by `torch.chunk`, all of one size but the last; `index` is whose box it is."""

    dim: int
    parts: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One tensor, and where it is."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    held: tuple[Box | None, ...]
    """By sender; None holds nothing of it."""
    needed: tuple[tuple[Box, ...], ...]
    """By receiver: boxes that do not overlap; none where it needs nothing of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    sender: int
    receivers: tuple[int, ...]
    tensor: int
    """Its number among those that were planned."""
    box: Box


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """Elements in it."""
    return math.prod(max(stop - start, 0) for start, stop in box)


def box_of(shape: Sequence[int], splits: Iterable[Split]) -> Box:
    """What is left of a tensor of `shape` after one split after the other; may be empty: few rows, many shards."""
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
    """`inner`, counted from where `outer`, which contains it, begins."""
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(inner, outer, strict=True))


def chopped(box: Box, elements: int) -> list[Box]:
    """Parts of at most so many elements, in order, as far as whole rows of the first dimensions allow."""
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
    """Boxes without an element in common, each of `boxes` inside one of them: what touches becomes one, what crosses
    the box around both."""
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
    """Whether they cross, or make one box together."""
    apart = [dim for dim, (ends, others) in enumerate(zip(one, other, strict=True)) if ends != others]
    if len(apart) == 1:
        (a, b), (c, d) = one[apart[0]], other[apart[0]]
        return max(a, c) <= min(b, d)
    return volume(intersection(one, other)) > 0


def overlap(boxes: Iterable[Box]) -> bool:
    """Whether two of them have an element in common."""
    ordered, end = sorted(boxes), 0
    for i, box in enumerate(ordered):
        if not box:
            return len(ordered) > 1
        if box[0][0] < end and any(volume(intersection(box, other)) for other in ordered[:i]):
            return True
        end = max(end, box[0][1])
    return False


def plan_transfers(tensors: Sequence[Placed]) -> list[Transfer]:
    """Every element that a receiver needs, from one sender that holds it. Of one tensor a sender has at most one box
    for the same receivers, unless these need crossing parts of it.

    Raises:
        ValueError: an element that is needed is held by nobody, or senders hold boxes that overlap in part.
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
    """Each box that is held, and by whom."""
    owners: dict[Box, list[int]] = defaultdict(list)
    for sender, box in enumerate(tensor.held):
        if box is not None and volume(box):
            owners[box].append(sender)
    if overlap(owners):
        raise ValueError(f"{tensor.name}: senders hold boxes that overlap in part: {sorted(owners)}")
    return {box: tuple(found) for box, found in owners.items()}


def regions(shape: Sequence[int], needed: Sequence[Sequence[Box]]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """What the same receivers need of a tensor, in boxes that do not overlap, in order.

    Args:
        needed: by receiver: boxes that do not overlap.
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
    """How many bytes each owner sends of what a set of owners holds: the largest load becomes as small as it can.

    One set after the other is levelled, over and over: descent on the sum of squared loads, which is convex.
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
    """Up to which `amount` fills vessels that are filled to ascending `heights` already."""
    filled = 0.0
    for count, height in enumerate(heights, 1):
        filled += height
        level = (amount + filled) / count
        if count == len(heights) or level <= heights[count]:
            return level
    return 0.0


def _dealt(boxes: Sequence[Box], sizes: Sequence[int], quotas: Sequence[float]) -> Iterator[tuple[int, int, Box]]:
    """(which box, which owner, its part): one owner after the other until its quota is full, cut between rows."""
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
