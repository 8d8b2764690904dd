"""Boxes: parts of a tensor, as learner ranks hold them and processes of engines need them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

Box = tuple[tuple[int, int], ...]
"""[start, stop) in every dimension of a tensor; () is the whole of a tensor without dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One dimension cut into `parts` as by `torch.chunk`, all of one size but the last; `index` selects one of them."""

    dim: int
    parts: int
    index: int


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    """Shape of a tensor that is the box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Number of elements in the box."""
    return math.prod(max(stop - start, 0) for start, stop in box)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


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


def flat_parts(tensor: torch.Tensor, start: int, count: int) -> Iterator[torch.Tensor]:
    """Yield the views that together are `tensor.flatten()[start : start + count]`; the tensor need not be
    contiguous."""
    if tensor.is_contiguous():
        yield tensor.view(-1)[start : start + count]
        return
    row = math.prod(tensor.shape[1:])
    while count:
        number, inside = divmod(start, row)
        rows = count // row if inside == 0 else 0
        take = rows * row if rows else min(row - inside, count)
        if rows:
            yield tensor[number : number + rows]
        else:
            yield from flat_parts(tensor[number], inside, take)
        start, count = start + take, count - take


def write_flat(target: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """`target.flatten()[start:start + len(values)] = values` for a `target` that need not be contiguous."""
    done = 0
    for part in flat_parts(target, start, len(values)):
        part.copy_(values[done : done + part.numel()].view(part.shape))
        done += part.numel()
