"""From sharded parameters to flat buckets on learner rank 0. Collective: every rank calls with the same names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from asyncrl.errors import WeightsError
from asyncrl.weights.fingerprint import Fingerprint
from asyncrl.weights.manifest import Bucket, Entry, Manifest, build_manifest
from asyncrl.weights.publishing.filling import Filling

_BLOCK = 1 << 18
"""Bytes copied at a time: what fits the cache of one core, so that the fingerprint finds them there."""
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


@dataclass(frozen=True, slots=True)
class Route:
    """How the shards come together."""

    background: bool
    """Beside training; else on the thread that calls, which nothing may overtake."""
    group: dist.ProcessGroup | None = None
    """Where the ranks meet instead of in the group that training uses."""


def choose_route(tensors: Sequence[tuple[str, torch.Tensor]], timeout_s: float) -> Route:
    """Collective: the ranks form a group of their own for a gather beside training.

    Two threads enqueue collectives in no order that the ranks share. gloo does not mind in groups apart. nccl may
    deadlock, and a layout other than FSDP2 is gathered in the groups of its mesh: both stay with the caller.
    """
    spread = [tensor for _, tensor in tensors if isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1]
    if not spread:
        return Route(background=True)
    mesh, rows = spread[0].device_mesh, _row_dim(spread[0])
    plain = all(_row_dim(tensor) == rows and tensor.device_mesh == mesh for tensor in spread)
    if rows is None or not plain or dist.get_backend(mesh.get_group(rows)) != "gloo":
        return Route(background=False)
    ranks = dist.get_process_group_ranks(mesh.get_group(rows))
    own = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=True)
    assert isinstance(own, dist.ProcessGroup)
    return Route(background=True, group=own)


@torch.no_grad()
def gather_into(
    manifest: Manifest,
    tensors: Sequence[tuple[str, torch.Tensor]],
    buffers: Sequence[torch.Tensor] | None,
    group: dist.ProcessGroup | None = None,
    filling: Filling | None = None,
    hashed: bool = True,
) -> list[str]:
    """Fill `buffers` (rank 0; None on other ranks) with the full tensors in the wire dtype.

    The shard is cast before it is gathered: bit-identical to the other order, and half the bytes for bfloat16.

    Args:
        group: as from `choose_route`.
        filling: told how far buffers on the host are, and on other ranks what has been read.
        hashed: whether to take fingerprints.

    Returns:
        Fingerprint of every bucket; none on other ranks, none of buffers on a device, and none unless `hashed`.
    """
    by_name = dict(tensors)
    prints = []
    before = 0
    for index, bucket in enumerate(manifest.buckets):
        buffer = buffers[index] if buffers is not None else None
        whole = _gather_bucket(bucket, by_name, buffer, group)
        if buffer is not None and buffer.device.type == "cpu":
            fingerprint = Fingerprint() if hashed else None
            for done, last in _fill(bucket, whole, buffer):
                if fingerprint is not None:
                    fingerprint.update_bytes(last)
                if filling is not None:
                    filling.reach(before + done)
            prints += [fingerprint.hex()] if fingerprint is not None else []
        elif buffer is not None:
            _fill_on_device(bucket, whole, buffer)
        before += bucket.nbytes
        if buffer is None and filling is not None:
            filling.reach(before)  # this rank's part has left
    return prints


def _gather_bucket(
    bucket: Bucket, tensors: dict[str, torch.Tensor], buffer: torch.Tensor | None, group: dist.ProcessGroup | None
) -> dict[str, torch.Tensor]:
    """Put together what is spread by rows, in `buffer`; returns the others, whole as they are."""
    whole: dict[str, torch.Tensor] = {}
    spread: list[Entry] = []
    for entry in bucket.entries:
        tensor = tensors[entry.name]
        if not isinstance(tensor, DTensor):
            whole[entry.name] = tensor
        elif tensor.device_mesh.size() == 1:
            whole[entry.name] = tensor.to_local()  # pyright: ignore[reportAttributeAccessIssue]
        elif _row_dim(tensor) is not None:
            spread.append(entry)
        else:
            # To where its ranks meet: it may lie in host memory.
            cast = tensor.to(tensor.device_mesh.device_type, entry.dtype)
            whole[entry.name] = cast.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
    views = bucket.views(buffer) if buffer is not None else None
    for dtype in dict.fromkeys(entry.dtype for entry in spread):
        if not _of_first_copy(tensors[spread[0].name]):
            break  # rank 0 has all it needs from the ranks of its own
        _gather_rows([entry for entry in spread if entry.dtype == dtype], tensors, views, group)
    return whole


def _fill(bucket: Bucket, whole: dict[str, torch.Tensor], buffer: torch.Tensor) -> Iterator[tuple[int, memoryview]]:
    """Copy the `whole` tensors to their places in blocks; yields how far `buffer` is final, and its latest bytes."""
    memory = buffer.numpy().data
    done = 0
    for entry in bucket.entries:
        if entry.name not in whole:
            continue  # in its place already
        source = whole[entry.name].reshape(-1)
        target = buffer[entry.offset : entry.offset + entry.nbytes].view(entry.dtype)
        block = _BLOCK // target.itemsize if source.device.type == "cpu" else max(1, target.numel())
        end = entry.offset
        for here, there in zip(target.split(block), source.split(block), strict=True):
            here.copy_(there)
            end += here.nbytes
            yield end, memory[done:end]
            done = end
    yield len(buffer), memory[done:]


def _fill_on_device(bucket: Bucket, whole: dict[str, torch.Tensor], buffer: torch.Tensor) -> None:
    for name, view in bucket.views(buffer).items():
        if name in whole:
            view.copy_(whole[name].view(view.shape))


def _row_dim(tensor: DTensor) -> int | None:
    """The dimension of its mesh along which it is split by rows, where that is all: FSDP2, in one or several copies."""
    split = [i for i, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
    if len(split) != 1:
        return None
    placement = tensor.placements[split[0]]
    return split[0] if type(placement) is Shard and placement.dim == 0 else None


def _of_first_copy(tensor: torch.Tensor) -> bool:
    """Whether this rank has a shard of the copy that rank 0 has a shard of."""
    assert isinstance(tensor, DTensor)
    coordinate, rows = tensor.device_mesh.get_coordinate() or (), _row_dim(tensor)
    return not any(place for dim, place in enumerate(coordinate) if dim != rows)


def _gather_rows(
    entries: list[Entry],
    tensors: dict[str, torch.Tensor],
    views: dict[str, torch.Tensor] | None,
    group: dist.ProcessGroup | None,
) -> None:
    """One collective for all row-sharded tensors of a bucket, in `group` or that of their mesh.

    Rank r of W holds rows `[r * ceil(n / W), ...)` of each (torch.chunk), padded here to equal sizes.
    """
    first = tensors[entries[0].name]
    assert isinstance(first, DTensor)
    rows = _row_dim(first)
    group = group or first.device_mesh.get_group(rows)
    world = dist.get_world_size(group)
    chunks = [-(-entry.shape[0] // world) * math.prod(entry.shape[1:]) for entry in entries]
    local = torch.zeros(sum(chunks), dtype=entries[0].dtype, device=first.device_mesh.device_type)
    offset = 0
    for entry, chunk in zip(entries, chunks, strict=True):
        tensor = tensors[entry.name]
        assert isinstance(tensor, DTensor)
        shard = tensor.to_local().reshape(-1)  # pyright: ignore[reportAttributeAccessIssue]
        local[offset : offset + shard.numel()] = shard
        offset += chunk
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
