"""Versions out of plain tensors, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrl.weights.fingerprint import bucket_fingerprint
from asyncrl.weights.publishing.buffers import pack
from asyncrl.weights.publishing.gather import Gather, manifest_of
from asyncrl.weights.publishing.version import Version


def version_of(
    named: Sequence[tuple[str, torch.Tensor]],
    policy_version: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    cap: int = 1 << 20,
    wait_s: float = 60.0,
    gather: Gather | None = None,
) -> Version:
    gather = gather or Gather(named, wait_s)
    return Version(policy_version, manifest_of(named, dtype, cap), dict(named), gather, wait_s)


def buckets_of(version: Version) -> list[torch.Tensor]:
    """The bytes of every bucket, in one pass."""
    found = []
    with version.open() as buckets:
        for index, bucket in enumerate(version.manifest.buckets):
            room = torch.empty(bucket.nbytes, dtype=torch.uint8)
            contents = buckets.take(index)
            pack(bucket, 0, room, contents.tensors)
            assert contents.buffer is None or torch.equal(contents.buffer, room)
            found.append(room)
    return found


def tensors_of(version: Version) -> dict[str, torch.Tensor]:
    return version.manifest.views(buckets_of(version))


def fingerprints_of(buffers: Sequence[torch.Tensor]) -> list[str]:
    return [bucket_fingerprint(buffer) for buffer in buffers]
