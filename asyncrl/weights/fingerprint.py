"""Fingerprints: proof that the bytes an engine holds are the bytes the learner meant."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash


class Fingerprint:
    """xxh3-128 of the bytes of a bucket that comes in pieces, in order: the same however it is cut.

    A piece that was just written is still in the processor's cache, where reading it costs a fifth of what it does
    later.
    """

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def update(self, piece: torch.Tensor) -> None:
        """The next bytes, as a flat uint8 tensor; those on a device are read back first."""
        self.update_bytes(piece.cpu().numpy().data)

    def update_bytes(self, piece: memoryview) -> None:
        """The next bytes, on the host."""
        self._digest.update(piece)

    def hex(self) -> str:
        return self._digest.hexdigest()


def bucket_fingerprint(buffer: torch.Tensor) -> str:
    """Of a flat uint8 tensor as a whole (padding included)."""
    fingerprint = Fingerprint()
    fingerprint.update(buffer)
    return fingerprint.hex()


def chain(fingerprints: Iterable[str]) -> str:
    """One fingerprint of the whole model from those of its buckets; swapping two buckets changes it."""
    digest = xxhash.xxh3_128()
    for fingerprint in fingerprints:
        digest.update(f"{fingerprint};".encode())
    return digest.hexdigest()
