"""Brings one bucket after another together on learner rank 0, out of the ranks' live parameters.

    rank 0    say(PASS)   begin(0)  begin(1) finish(0)  begin(2) finish(1) ...   say(END)
    others    hear()      begin(0)  begin(1) finish(0) ...                      hear() -> the version is not read again

A shard is cast to the wire dtype on its device before it is gathered: bit-identical to the reverse order, and half the
bytes for bfloat16.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from asyncrl.weights.manifest import Bucket, Entry, Manifest, build_manifest

PASS, TICK, END = 1, 2, 3
"""What rank 0 tells the others: gather all buckets once; nothing yet; nobody reads this version any more."""


def manifest_of(tensors: Sequence[tuple[str, torch.Tensor]], wire_dtype: torch.dtype, cap_bytes: int) -> Manifest:
    """Return the manifest of `tensors` (global shapes), with floating-point ones in the wire dtype."""
    return build_manifest(
        ((name, tuple(t.shape), wire_dtype if t.is_floating_point() else t.dtype) for name, t in tensors), cap_bytes
    )


class Gather:
    """How the ranks that hold these tensors bring them together. Made by all ranks, once for all versions.

    Args:
        timeout_s: longest wait for another rank.

    Attributes:
        background: whether the gather may run on a thread beside training. Two threads enqueue collectives in an order
            that differs between ranks: gloo allows that in separate groups. nccl may deadlock, and a layout other than
            FSDP2 is gathered in the groups of its mesh: both gather while training stands still.
        takes_part: whether rank 0 needs something from this rank.
        device: where rank 0 puts the buckets together; None if it has all tensors whole.
    """

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]], timeout_s: float) -> None:
        self.background, self.takes_part = True, True
        self.device: torch.device | None = None
        self._words: dist.ProcessGroup | None = None
        self._rows: dist.ProcessGroup | None = None
        self._lock = threading.Lock()
        spread = [tensor for _, tensor in tensors if isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1]
        if not spread:
            self.takes_part = not dist.is_initialized() or dist.get_rank() == 0
            return
        mesh, rows = spread[0].device_mesh, _row_dim(spread[0])
        on_gpu = mesh.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        plain = all(_row_dim(tensor) == rows and tensor.device_mesh == mesh for tensor in spread)
        self.background = rows is not None and plain and dist.get_backend(mesh.get_group(rows)) == "gloo"
        ranks = dist.get_process_group_ranks(mesh.get_group(rows)) if self.background else None
        group = dist.new_group(
            ranks, timeout=timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=ranks is not None
        )
        assert isinstance(group, dist.ProcessGroup)
        self._words, self._rows = group, group if self.background else None
        self.takes_part = ranks is None or 0 in ranks  # a replica of the model has nothing that rank 0 lacks

    @property
    def shared(self) -> bool:
        """Whether other ranks take part."""
        return self._words is not None

    def say(self, word: int) -> None:
        """Tell the other ranks; called by rank 0, by one thread at a time. Returns once they have it, or at once
        without any."""
        if self._words is not None:
            with self._lock:
                dist.broadcast(torch.tensor([word]), 0, group=self._words)

    def hear(self) -> int:
        """Return what rank 0 says next. Waits for it as long as it says something in time."""
        word = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(word, 0, group=self._words)
        return int(word)

    @torch.no_grad()
    def begin(self, bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> BucketInTransfer:
        """Start to gather a bucket. Collective: every rank begins and finishes the same buckets in the same order."""
        found = BucketInTransfer(bucket, place=self.device)
        spread: list[Entry] = []
        for entry in bucket.entries:
            tensor = tensors[entry.name]
            if not isinstance(tensor, DTensor):
                found.whole[entry.name] = tensor
            elif tensor.device_mesh.size() == 1:
                found.whole[entry.name] = tensor.to_local()  # pyright: ignore[reportAttributeAccessIssue]
            elif _row_dim(tensor) is not None:
                spread.append(entry)
            else:
                # Moved to the mesh's device type, since it may be in host memory.
                cast = tensor.to(tensor.device_mesh.device_type).to(entry.dtype)
                full = cast.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
                if dist.get_rank() == 0:
                    found.whole[entry.name] = full
        for dtype in dict.fromkeys(entry.dtype for entry in spread):
            if _of_first_copy(tensors[spread[0].name]):  # rank 0 needs nothing from the ranks of another replica
                found.rows.append(self._begin_rows([entry for entry in spread if entry.dtype == dtype], tensors))
        return found

    def _begin_rows(self, entries: list[Entry], tensors: Mapping[str, torch.Tensor]) -> _Rows:
        """Gather row-sharded tensors of one dtype in one collective.

        Rank r of W holds rows `[r * ceil(n / W), ...)` of each (torch.chunk), padded here to equal sizes.
        """
        first = tensors[entries[0].name]
        assert isinstance(first, DTensor)
        group = self._rows or first.device_mesh.get_group(_row_dim(first))
        world = dist.get_world_size(group)
        chunks = [-(-entry.shape[0] // world) * math.prod(entry.shape[1:]) for entry in entries]
        local = torch.zeros(sum(chunks), dtype=entries[0].dtype, device=first.device_mesh.device_type)
        offset = 0
        for entry, chunk in zip(entries, chunks, strict=True):
            tensor = tensors[entry.name]
            assert isinstance(tensor, DTensor)
            shard = tensor.to_local().reshape(-1)  # pyright: ignore[reportAttributeAccessIssue]
            local[offset : offset + shard.numel()].copy_(shard.to(local.device))
            offset += chunk
        parts = [torch.empty_like(local) for _ in range(world)] if dist.get_rank(group) == 0 else None
        work = dist.gather(local, parts, dst=dist.get_global_rank(group, 0), group=group, async_op=True)
        return _Rows(entries=entries, chunks=chunks, local=local, parts=parts, work=work)

    def follow(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take part, on a rank other than 0, until rank 0 says that nobody reads this version any more."""
        while (word := self.hear()) != END:
            if word == PASS:
                for bucket in manifest.buckets:
                    self.begin(bucket, tensors).finish()


@dataclass(slots=True)
class _Rows:
    entries: list[Entry]
    chunks: list[int]
    local: torch.Tensor
    parts: list[torch.Tensor] | None
    work: Any

    def into(self, views: Mapping[str, torch.Tensor]) -> None:
        offset = 0
        for entry, chunk in zip(self.entries, self.chunks, strict=True):
            flat, done = views[entry.name].view(-1), 0
            for part in self.parts or ():
                take = min(chunk, flat.numel() - done)
                flat[done : done + take] = part[offset : offset + take]
                done += take
            offset += chunk


@dataclass(slots=True)
class BucketInTransfer:
    """A bucket whose shards are on their way to rank 0."""

    bucket: Bucket
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that this rank has whole: the live parameters themselves, or gathered ones."""
    rows: list[_Rows] = field(default_factory=list)
    place: torch.device | None = None
    """Where rank 0 puts the bucket together; None: the live parameters are all that is needed."""

    @torch.no_grad()
    def finish(self) -> BucketContents:
        """Wait for the shards; rank 0 puts them together."""
        for rows in self.rows:
            if rows.work is not None:
                rows.work.wait()
        if self.place is None or dist.get_rank() != 0:
            return BucketContents(tensors=self.whole)
        place = self.place
        buffer = torch.zeros(self.bucket.nbytes, dtype=torch.uint8, device=place)
        views = self.bucket.views(buffer)
        for rows in self.rows:
            rows.into(views)
        for name, tensor in self.whole.items():
            views[name].copy_(tensor.to(place).view(views[name].shape))
        self.rows, self.whole = [], {}
        return BucketContents(tensors=views, buffer=buffer)


@dataclass(frozen=True, slots=True)
class BucketContents:
    tensors: Mapping[str, torch.Tensor]
    """By name: whole, and not necessarily in the wire dtype or contiguous."""
    buffer: torch.Tensor | None = None
    """The bucket [nbytes] uint8 in the wire dtype, of which the tensors are views; None for live parameters."""


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
