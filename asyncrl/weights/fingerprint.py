"""Fingerprints: proof that the bytes an engine holds are the bytes the learner meant."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash


def bucket_fingerprint(buffer: torch.Tensor) -> str:
    """xxh3-128 of the bytes of a flat uint8 tensor (padding included); device buffers are read back first."""
    return xxhash.xxh3_128_hexdigest(buffer.cpu().numpy().data)


def chain(fingerprints: Iterable[str]) -> str:
    """One fingerprint of the whole model from those of its buckets; swapping two buckets changes it."""
    digest = xxhash.xxh3_128()
    for fingerprint in fingerprints:
        digest.update(f"{fingerprint};".encode())
    return digest.hexdigest()
