"""Plans what each learner rank sends when all of them send: boxes of tensors, in buckets of the rank's own.

Planned as for engines that take whole tensors, so that what a rank copies does not depend on the engines present. Each
sender has at most one box of a tensor. Which receiver gets which part of it is decided by `weights.flows`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.boxes import Box, overlap, sizes, volume, whole
from asyncrl.weights.manifest import Entry, Manifest, build_manifest

RANK0 = "Use weights.senders=rank0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one sender sends."""

    manifest: Manifest
    """Manifest of its boxes, under the names of the tensors that they are cut from."""
    boxes: Mapping[str, Box]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    whole: Manifest
    """Manifest of the model."""
    of: tuple[Share, ...]


def divide(manifest: Manifest, held: Mapping[str, Sequence[Box | None]], senders: int, cap_bytes: int) -> Shares:
    """Plan the shares: what several senders hold alike, each sends an equal part of.

    Args:
        manifest: of the model, in the wire dtype.
        held: the box that each sender holds of each tensor, by name.
        cap_bytes: limit on a sender's bucket.

    Raises:
        WeightsError: the senders together do not hold all of a tensor, or hold boxes of it that overlap in part.
    """
    found: list[dict[str, Box]] = [{} for _ in range(senders)]
    for owners, pieces in _held_alike(manifest, held).items():
        for owner, name, box in _dealt(pieces, len(owners)):
            found[owners[owner]][name] = box
    shares = []
    for boxes in found:
        own = [entry for entry in manifest.entries if entry.name in boxes]
        rows = [(entry.name, sizes(boxes[entry.name]), entry.dtype) for entry in own]
        shares.append(Share(manifest=build_manifest(rows, cap_bytes), boxes={e.name: boxes[e.name] for e in own}))
    return Shares(whole=manifest, of=tuple(shares))


def _held_alike(
    manifest: Manifest, held: Mapping[str, Sequence[Box | None]]
) -> dict[tuple[int, ...], list[tuple[Entry, Box]]]:
    """The boxes that a set of senders holds, by that set, in the order of the manifest."""
    found: dict[tuple[int, ...], list[tuple[Entry, Box]]] = defaultdict(list)
    for entry in manifest.entries:
        owners: dict[Box, list[int]] = defaultdict(list)
        for sender, box in enumerate(held[entry.name]):
            if box is not None and volume(box):
                owners[box].append(sender)
        problem = f"hold boxes that overlap in part: {sorted(owners)}" if overlap(owners) else ""
        if missing := volume(whole(entry.shape)) - sum(map(volume, owners)):
            problem = problem or f"hold {sorted(owners)}, which lack {missing} elements"
        if problem:
            raise WeightsError(
                f"the learner ranks cannot each send their share: of {entry.name} they {problem}. {RANK0}"
            )
        for box, several in owners.items():
            found[tuple(several)].append((entry, box))
    return found


def _dealt(pieces: Sequence[tuple[Entry, Box]], owners: int) -> Iterator[tuple[int, str, Box]]:
    """Yield (index of the owner, tensor, its part): an equal number of bytes for each owner, in order, cut between
    rows."""
    each = sum(volume(box) * entry.dtype.itemsize for entry, box in pieces) / owners
    owner, done = 0, 0.0
    for entry, box in pieces:
        dim = next((i for i, (start, stop) in enumerate(box) if stop - start > 1), None)
        start, stop = (0, 1) if dim is None else box[dim]
        row = volume(box) * entry.dtype.itemsize / (stop - start)
        while start < stop:
            take = stop - start
            if owner < owners - 1:
                take = min(take, round((each * (owner + 1) - done) / row))
            if take > 0:
                yield owner, entry.name, box if dim is None else (*box[:dim], (start, start + take), *box[dim + 1 :])
                start, done = start + take, done + take * row
            if start < stop:
                owner += 1


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


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
