"""Plans what each learner rank sends when all of them send: boxes of tensors, in buckets of the rank's own.

Planned as for engines that take whole tensors, so that what a rank copies does not depend on the engines present. Each
sender has at most one box of a tensor. Which receiver gets which part of it is decided by `weights.flows`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.manifest import Entry, Manifest, build_manifest
from asyncrl.weights.plan import Box, Placed, plan_transfers, whole

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
    """Shares by sender."""


def divide(manifest: Manifest, held: Mapping[str, Sequence[Box | None]], senders: int, cap_bytes: int) -> Shares:
    """Plan the shares for engines that need whole tensors.

    Args:
        manifest: of the model, in the wire dtype.
        held: the box that each sender holds of each tensor, by name.
        cap_bytes: limit on a sender's bucket.

    Raises:
        WeightsError: the senders together do not hold all of a tensor, or hold boxes of it that overlap in part.
    """
    entries = _entries(manifest)
    placed = [
        Placed(
            name=e.name, shape=e.shape, itemsize=e.dtype.itemsize, held=tuple(held[e.name]), needed=((whole(e.shape),),)
        )
        for e in entries
    ]  # fmt: skip
    try:
        transfers = plan_transfers(placed)
    except ValueError as error:
        raise WeightsError(f"the learner ranks cannot each send their share: {error}. {RANK0}") from error
    boxes: list[dict[str, Box]] = [{} for _ in range(senders)]
    for transfer in transfers:
        boxes[transfer.sender][entries[transfer.tensor].name] = transfer.box
    dtypes = {entry.name: entry.dtype for entry in entries}
    shares = []
    for own in boxes:
        rows = [(name, tuple(stop - start for start, stop in box), dtypes[name]) for name, box in own.items()]
        shares.append(Share(manifest=build_manifest(rows, cap_bytes), boxes=own))
    return Shares(whole=manifest, of=tuple(shares))


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


def _entries(manifest: Manifest) -> list[Entry]:
    return [entry for bucket in manifest.buckets for entry in bucket.entries]
