"""From sharded parameters to flat buckets on learner rank 0. Collective: every rank calls with the same names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from asyncrl.errors import WeightsError
from asyncrl.weights.manifest import Bucket, Entry, Manifest, build_manifest

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def clean_name(name: str) -> str:
    """The Hugging Face name: what `torch.compile` and activation checkpointing put in front of parts is taken out."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def unique_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Clean names, each tensor once: tied parameters go over the wire under their first name.

    Raises:
        WeightsError: two different tensors under one name.
    """
    seen: set[int] = set()
    by_name: dict[str, torch.Tensor] = {}
    for raw, tensor in tensors:
        name = clean_name(raw)
        if id(tensor) in seen:
            continue
        if name in by_name:
            raise WeightsError(f"two tensors are called {name!r} after wrapper prefixes are stripped")
        seen.add(id(tensor))
        by_name[name] = tensor
    return list(by_name.items())


def plan(tensors: Sequence[tuple[str, torch.Tensor]], wire_dtype: torch.dtype, cap_bytes: int) -> Manifest:
    """Manifest of `tensors` (global shapes) with floating-point ones in the wire dtype."""
    return build_manifest(
        ((name, tuple(t.shape), wire_dtype if t.is_floating_point() else t.dtype) for name, t in tensors), cap_bytes
    )


@torch.no_grad()
def gather_into(
    manifest: Manifest, tensors: Sequence[tuple[str, torch.Tensor]], buffers: Sequence[torch.Tensor] | None
) -> None:
    """Fill `buffers` (rank 0; None on other ranks) with the full tensors in the wire dtype.

    The shard is cast before it is gathered: bit-identical to the other order, and half the bytes for bfloat16.
    """
    by_name = dict(tensors)
    for index, bucket in enumerate(manifest.buckets):
        views = bucket.views(buffers[index]) if buffers is not None else None
        _gather_bucket(bucket, by_name, views)


def _gather_bucket(bucket: Bucket, tensors: dict[str, torch.Tensor], views: dict[str, torch.Tensor] | None) -> None:
    sharded: list[Entry] = []
    for entry in bucket.entries:
        tensor = tensors[entry.name].detach()
        if isinstance(tensor, DTensor):
            if _is_row_sharded(tensor):
                sharded.append(entry)
                continue
            tensor = tensor.to(entry.dtype).full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
        if views is not None:
            views[entry.name].copy_(tensor)
    for dtype in dict.fromkeys(entry.dtype for entry in sharded):
        _gather_rows([entry for entry in sharded if entry.dtype == dtype], tensors, views)


def _is_row_sharded(tensor: DTensor) -> bool:
    """Plain FSDP2: one mesh dimension, split along dimension 0."""
    placements = tensor.placements
    return tensor.device_mesh.ndim == 1 and type(placements[0]) is Shard and placements[0].dim == 0


def _gather_rows(entries: list[Entry], tensors: dict[str, torch.Tensor], views: dict[str, torch.Tensor] | None) -> None:
    """One collective for all row-sharded tensors of a bucket.

    Rank r of W holds rows `[r * ceil(n / W), ...)` of each (torch.chunk), padded here to equal sizes.
    """
    first = tensors[entries[0].name]
    assert isinstance(first, DTensor)
    mesh = first.device_mesh
    world, group = mesh.size(), mesh.get_group()
    chunks = [-(-entry.shape[0] // world) * math.prod(entry.shape[1:]) for entry in entries]
    local = torch.zeros(sum(chunks), dtype=entries[0].dtype, device=first.to_local().device)
    offset = 0
    for entry, chunk in zip(entries, chunks, strict=True):
        tensor = tensors[entry.name]
        assert isinstance(tensor, DTensor)
        shard = tensor.detach().to_local().reshape(-1)  # pyright: ignore[reportAttributeAccessIssue]
        local[offset : offset + shard.numel()] = shard
        offset += chunk
    if world == 1:
        parts: list[torch.Tensor] | None = [local]
    else:
        parts = [torch.empty_like(local) for _ in range(world)] if dist.get_rank(group) == 0 else None
        dist.gather(local, parts, dst=dist.get_global_rank(group, 0), group=group)
    if views is None or parts is None:
        return
    offset = 0
    for entry, chunk in zip(entries, chunks, strict=True):
        flat, done = views[entry.name].view(-1), 0
        for part in parts:
            take = min(chunk, flat.numel() - done)
            flat[done : done + take] = part[offset : offset + take]
            done += take
        offset += chunk
