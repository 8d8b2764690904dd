"""Gathers sharded parameters into flat buckets on learner rank 0. Collective: every rank calls with the same names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from asyncrl.weights.fingerprint import Fingerprint
from asyncrl.weights.manifest import Bucket, Entry, Manifest, build_manifest
from asyncrl.weights.publishing.filling import Filling

_BLOCK = 1 << 20
"""Bytes copied at a time, a multiple of the fingerprint's leaves, which are read out of the cache. Shorter blocks cost
more in calls than they save."""


def plan(tensors: Sequence[tuple[str, torch.Tensor]], wire_dtype: torch.dtype, cap_bytes: int) -> Manifest:
    """Return the manifest of `tensors` (global shapes), with floating-point ones in the wire dtype."""
    return build_manifest(
        ((name, tuple(t.shape), wire_dtype if t.is_floating_point() else t.dtype) for name, t in tensors), cap_bytes
    )


@dataclass(frozen=True, slots=True)
class Route:
    """How the shards are gathered."""

    background: bool
    """Whether to gather beside training; otherwise on the calling thread, where nothing can overtake it."""
    group: dist.ProcessGroup | None = None
    """Process group to use instead of the one that training uses."""


def choose_route(tensors: Sequence[tuple[str, torch.Tensor]], timeout_s: float) -> Route:
    """Choose how to gather. Collective: for a gather beside training the ranks form a process group of their own.

    Two threads enqueue collectives in an order that differs between ranks. gloo allows that in separate groups. nccl
    may deadlock, and a layout other than FSDP2 is gathered in the groups of its mesh: both gather on the calling
    thread.
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

    The shard is cast before it is gathered: bit-identical to the reverse order, and half the bytes for bfloat16.

    Args:
        group: from `choose_route`.
        filling: gets the progress of the copy: bytes of buffers on the host, and on other ranks bytes that were read.
        hashed: whether to compute fingerprints.

    Returns:
        Fingerprint of every bucket; empty on other ranks, for buffers on a device, and unless `hashed`.
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
            filling.reach(before)  # this rank's part has been sent
    return prints


def _gather_bucket(
    bucket: Bucket, tensors: dict[str, torch.Tensor], buffer: torch.Tensor | None, group: dist.ProcessGroup | None
) -> dict[str, torch.Tensor]:
    """Gather the row-sharded tensors into `buffer`; returns the other tensors, whole."""
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
            # Moved to the mesh's device type, since it may be in host memory.
            cast = tensor.to(tensor.device_mesh.device_type, entry.dtype)
            whole[entry.name] = cast.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
    views = bucket.views(buffer) if buffer is not None and spread else None
    for dtype in dict.fromkeys(entry.dtype for entry in spread):
        if not _of_first_copy(tensors[spread[0].name]):
            break  # rank 0 needs nothing from the ranks of another replica
        _gather_rows([entry for entry in spread if entry.dtype == dtype], tensors, views, group)
    return whole


def _fill(bucket: Bucket, whole: dict[str, torch.Tensor], buffer: torch.Tensor) -> Iterator[tuple[int, memoryview]]:
    """Copy the `whole` tensors to their places in blocks; yields how many bytes of `buffer` are final, and the latest
    of them."""
    memory = buffer.numpy().data
    done = 0
    for end, targets, sources in _blocks(bucket, whole, buffer):
        # One call, so that the interpreter lock is passed on once a block.
        torch._foreach_copy_(targets, sources)
        yield end, memory[done:end]
        done = end
    yield len(buffer), memory[done:]


def _blocks(
    bucket: Bucket, whole: dict[str, torch.Tensor], buffer: torch.Tensor
) -> Iterator[tuple[int, list[torch.Tensor], list[torch.Tensor]]]:
    """Divide what has to be copied into blocks of about `_BLOCK` bytes: end in the buffer, targets, sources. They end
    at multiples of `_BLOCK`, so that the fingerprint gets whole leaves. A tensor on a device is in one piece."""
    targets, sources = list[torch.Tensor](), list[torch.Tensor]()
    begun = end = 0
    for entry in bucket.entries:
        if entry.name not in whole:
            continue  # already in place
        source = whole[entry.name].reshape(-1)
        target = buffer[entry.offset : entry.offset + entry.nbytes].view(entry.dtype)
        cuts = _cuts(entry) if source.device.type == "cpu" else [target.numel()]
        end = entry.offset
        for here, there in zip(target.split(cuts), source.split(cuts), strict=True):
            targets.append(here)
            sources.append(there)
            end += here.nbytes
            if end // _BLOCK > begun // _BLOCK:
                yield end, targets, sources
                targets, sources, begun = [], [], end
    if targets:
        yield end, targets, sources


def _cuts(entry: Entry) -> list[int]:
    """Lengths of the parts of a tensor that lie between two multiples of `_BLOCK` in the buffer."""
    step, count = _BLOCK // entry.dtype.itemsize, entry.nbytes // entry.dtype.itemsize
    first = min(-entry.offset % _BLOCK // entry.dtype.itemsize, count)
    blocks, rest = divmod(count - first, step)
    return [size for size in (first, *[step] * blocks, rest) if size]


def _fill_on_device(bucket: Bucket, whole: dict[str, torch.Tensor], buffer: torch.Tensor) -> None:
    for name, view in bucket.views(buffer).items():
        if name in whole:
            view.copy_(whole[name].view(view.shape))


def _row_dim(tensor: DTensor) -> int | None:
    """The mesh dimension along which the tensor is split by rows, if that is its only split (FSDP2, with or without
    replicas); otherwise None."""
    split = [i for i, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
    if len(split) != 1:
        return None
    placement = tensor.placements[split[0]]
    return split[0] if type(placement) is Shard and placement.dim == 0 else None


def _of_first_copy(tensor: torch.Tensor) -> bool:
    """Whether this rank has a shard of the same replica as rank 0."""
    assert isinstance(tensor, DTensor)
    coordinate, rows = tensor.device_mesh.get_coordinate() or (), _row_dim(tensor)
    return not any(place for dim, place in enumerate(coordinate) if dim != rows)


def _gather_rows(
    entries: list[Entry],
    tensors: dict[str, torch.Tensor],
    views: dict[str, torch.Tensor] | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Gather all row-sharded tensors of a bucket in one collective, in `group` or the group of their mesh.

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
