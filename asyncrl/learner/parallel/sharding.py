"""Which part of a tensor a rank holds, if ranks share it along several dimensions of their mesh."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from asyncrl.checks.parallel import EXPERT, REPLICATE, SHARD, TENSOR
from asyncrl.weights.boxes import Box, whole
from asyncrl.weights.publishing.sharding import box_at, local

SHARDED = "sharded"
"""Mesh dimension of the ranks that shard one copy, flattened from `SHARD` and `EXPERT` with expert parallelism."""


def dim_size(mesh: DeviceMesh | None, name: str) -> int:
    """Number of ranks along a dimension; 1 if the mesh lacks it. A mesh with one unnamed dimension shards along it."""
    if mesh is None:
        return 1
    names: tuple[str, ...] = mesh.mesh_dim_names or (SHARD,)
    return mesh.size(names.index(name)) if name in names else 1


def device_of(mesh: DeviceMesh) -> torch.device:
    """Device with which the ranks compute and communicate."""
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Mesh of the ranks that train on different sequences, as `fully_shard` takes it, copies first."""
    if dim_size(mesh, EXPERT) == 1:
        return _without(mesh, TENSOR)
    together = mesh[SHARD, EXPERT]._flatten(SHARDED)
    return DeviceMesh._concatenate([mesh[REPLICATE], together]) if dim_size(mesh, REPLICATE) > 1 else together


def expert_data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Mesh of those among them that have the same experts, in the same form."""
    return _without(mesh, TENSOR, EXPERT)


def _without(mesh: DeviceMesh, *dims: str) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    kept = tuple(name for name in names if name not in dims)
    return mesh if kept == names else mesh[kept]


def shards_of(tensor: Tensor) -> int:
    """Number of different parts into which `tensor` is split; further ranks hold copies of them."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not isinstance(placement, Replicate))


def numbers_computed_with(tensor: Tensor) -> int:
    """Elements of a parameter that a rank computes with: all; with expert parallelism only those of its own experts."""
    return tensor.numel() // (dim_size(tensor.device_mesh, EXPERT) if isinstance(tensor, DTensor) else 1)


def part_and_box(tensor: Tensor) -> tuple[Tensor, Box]:
    """This rank's part, and its box within the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, whole(tensor.shape)
    return local(tensor), box_at(tensor, tensor.device_mesh.get_coordinate() or ())
