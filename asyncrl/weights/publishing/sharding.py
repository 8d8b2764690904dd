"""Finds the box of each tensor that every learner rank holds, from the DTensors alone: all ranks compute the same
without communication."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from asyncrl.errors import WeightsError
from asyncrl.weights.boxes import Box, Split, box_of, sizes, whole, within
from asyncrl.weights.publishing.gather import plan
from asyncrl.weights.shares import RANK0, Share, Shares, divide, slices


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnShare:
    """What this rank sends, and its position in the rank's shards."""

    shares: Shares
    share: Share
    _held: Mapping[str, Box | None]

    @classmethod
    def of(
        cls, named: Sequence[tuple[str, torch.Tensor]], rank: int, world: int, wire_dtype: torch.dtype, cap_bytes: int
    ) -> OwnShare:
        """Plan the shares of `world` learner ranks; every rank computes the same plan.

        Raises:
            WeightsError: a tensor is sharded in a way that is not supported here, or the ranks do not hold all of it.
        """
        held = {name: held_boxes(name, tensor, world) for name, tensor in named}
        for name, tensor in named:
            box, mine = held[name][rank], local(tensor)
            if box is not None and sizes(box) != tuple(mine.shape):
                raise WeightsError(
                    f"rank {rank} holds {tuple(mine.shape)} of {name} {tuple(tensor.shape)}, expected {box}. {RANK0}"
                )
        shares = divide(plan(named, wire_dtype, cap_bytes), held, world, cap_bytes)
        return cls(shares=shares, share=shares.of[rank], _held={name: boxes[rank] for name, boxes in held.items()})

    def parts(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """`(name, view of this rank's shard)`, in the order of its buckets."""
        by_name, found = dict(named), []
        for name, box in self.share.boxes.items():
            held = self._held[name]
            assert held is not None  # the plan takes from a rank only what it holds
            found.append((name, local(by_name[name])[slices(within(held, box))]))
        return found


def held_boxes(name: str, tensor: torch.Tensor, world: int) -> list[Box | None]:
    """Return the box of a tensor that each rank holds; a tensor that is no DTensor is whole on all ranks."""
    if not isinstance(tensor, DTensor):
        return [whole(tensor.shape)] * world
    mesh = tensor.device_mesh
    if mesh.size() != world:
        raise WeightsError(
            f"{name} is on {mesh.size()} of {world} ranks, and what is on the others is not known. {RANK0}"
        )
    kinds = (Shard, _StridedShard, Replicate)
    if not all(isinstance(placement, kinds) for placement in tensor.placements):
        raise WeightsError(f"{name} is placed as {tensor.placements}, which has no boxes. {RANK0}")
    held: list[Box | None] = [None] * world
    for coordinate in itertools.product(*map(range, mesh.shape)):
        held[int(mesh.mesh[coordinate])] = box_at(tensor, coordinate)
    return held


def box_at(tensor: DTensor, coordinate: Sequence[int]) -> Box:
    """The box of a tensor that the rank at `coordinate` of its mesh holds.

    FSDP2 over tensor or expert parallelism shards what is already sharded: its placement is a `_StridedShard` if its
    mesh dimension comes before the other's.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    order = sorted(range(mesh.ndim), key=lambda i: isinstance(placements[i], _StridedShard))
    splits = [
        Split(dim=placement.dim, parts=mesh.size(i), index=coordinate[i])
        for i in order
        if isinstance(placement := placements[i], (Shard, _StridedShard))
    ]
    return box_of(tensor.shape, splits)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of the tensor, sharing memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def memory_of(tensor: torch.Tensor) -> int:
    """Address of the memory that holds this rank's part: the same for all views of one storage."""
    return local(tensor).untyped_storage().data_ptr()
