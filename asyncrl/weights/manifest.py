"""Describes what a version consists of: names, shapes, dtypes, and the position of each tensor in a bucket.

A bucket is one flat uint8 buffer that is sent in one piece. The tensors of a layer stay together, offsets are aligned,
and both ends derive the same views from the same manifest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.ipc import shared_bytes

_ALIGN = 16
_LAYER = re.compile(r"^(.*?\.\d+)\.")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool,
)}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor in a bucket; offset and size in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    entries: tuple[Entry, ...]
    nbytes: int

    @property
    def element_bytes(self) -> int:
        """Bytes per element of the bucket's first tensor; the unit of a delta."""
        return self.entries[0].dtype.itemsize

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """`{name: tensor}` over the bytes of `buffer` [nbytes] uint8, without copying."""
        return {
            entry.name: buffer[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).view(entry.shape)
            for entry in self.entries
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    buckets: tuple[Bucket, ...]

    @property
    def entries(self) -> list[Entry]:
        return [entry for bucket in self.buckets for entry in bucket.entries]

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    def allocate(self, device: torch.device | str = "cpu", *, shared: bool = False) -> list[torch.Tensor]:
        """Allocate one uint8 buffer per bucket. `shared`: for `ipc.export`, host buffers share one memory file."""
        if shared and torch.device(device).type == "cpu":
            return list(shared_bytes(self.nbytes).split([bucket.nbytes for bucket in self.buckets]))
        return [torch.zeros(bucket.nbytes, dtype=torch.uint8, device=device) for bucket in self.buckets]

    def shapes(self) -> dict[str, torch.Tensor]:
        """Every tensor, by name, without data (on `meta`)."""
        return self.views(self.allocate("meta"))

    def views(self, buffers: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every tensor, by name, over the bytes of all buckets."""
        return {k: v for b, buffer in zip(self.buckets, buffers, strict=True) for k, v in b.views(buffer).items()}

    def to_wire(self) -> list[Any]:
        """msgpack-able; read back by `from_wire`."""
        return [
            [[e.name, list(e.shape), str(e.dtype).removeprefix("torch.")] for e in bucket.entries]
            for bucket in self.buckets
        ]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> Manifest:
        """Read a manifest. Offsets are computed here, never taken from the peer.

        Raises:
            WeightsError: an unknown dtype, a bad shape or a duplicate name.
        """
        buckets = []
        for rows in wire:
            for name, shape, dtype in rows:
                if dtype not in _DTYPES or any(int(size) < 0 for size in shape):
                    raise WeightsError(f"manifest entry {name!r} has dtype {dtype!r} and shape {shape}: not a tensor")
            buckets.append(_bucket([(str(n), tuple(map(int, s)), _DTYPES[d]) for n, s, d in rows]))
        found = cls(buckets=tuple(buckets))
        if len({entry.name for entry in found.entries}) != len(found.entries):
            raise WeightsError("a manifest names the same tensor twice")
        return found


def build_manifest(tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], cap_bytes: int) -> Manifest:
    """Divide into buckets of at most `cap_bytes` in the given order; a layer is split only if it alone exceeds the
    cap."""
    buckets: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = []
    size = 0
    for layer in _layers(tensors):
        nbytes = sum(_padded(shape, dtype) for _, shape, dtype in layer)
        parts = [layer] if nbytes <= cap_bytes else [[tensor] for tensor in layer]
        for part in parts:
            part_bytes = sum(_padded(shape, dtype) for _, shape, dtype in part)
            if not buckets or size + part_bytes > cap_bytes:
                buckets.append([])
                size = 0
            buckets[-1].extend(part)
            size += part_bytes
    return Manifest(buckets=tuple(_bucket(bucket) for bucket in buckets))


def _layers(
    tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]],
) -> list[list[tuple[str, tuple[int, ...], torch.dtype]]]:
    """Group consecutive tensors of one layer (`model.layers.3.…`); the others stay single."""
    groups: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = []
    last = None
    for tensor in tensors:
        found = _LAYER.match(tensor[0])
        layer = found.group(1) if found else None
        if layer is None or layer != last:
            groups.append([])
        groups[-1].append(tensor)
        last = layer
    return groups


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-_nbytes(shape, dtype) // _ALIGN) * _ALIGN


def _bucket(tensors: list[tuple[str, tuple[int, ...], torch.dtype]]) -> Bucket:
    entries, offset = [], 0
    for name, shape, dtype in tensors:
        entries.append(Entry(name=name, shape=shape, dtype=dtype, offset=offset, nbytes=_nbytes(shape, dtype)))
        offset += _padded(shape, dtype)
    return Bucket(entries=tuple(entries), nbytes=offset)
