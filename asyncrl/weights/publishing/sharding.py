"""The part of a DTensor that each rank holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from asyncrl.weights.boxes import Box, Split, box_of


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
