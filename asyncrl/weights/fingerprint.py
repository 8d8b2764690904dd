"""Fingerprints: prove that the bytes an engine holds are the bytes that the learner sent.

    bytes --every 8 KiB--> leaf: xxh3-64 of them --> xxh3-128 of all leaves, in order

The input is divided into leaves because xxh3 reads its input sequentially. On a GPU torch computes many leaves in
parallel (`leaves_on_device`), and only 8 bytes per leaf are copied to the host. On the host the xxhash library computes
them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import xxhash
from jaxtyping import Int64, UInt8
from numpy.typing import NDArray

LEAF = 1 << 13
"""Bytes per leaf: 8 of the blocks that xxh3 mixes one after another. On a device each of them is five operations,
whatever the number of leaves; on the host longer leaves would need fewer calls."""
_AT_ONCE = 64 << 20
"""Bytes hashed in one pass on a device; bounds the temporary memory that hashing takes."""


class Fingerprint:
    """Fingerprint of a bucket's bytes, which arrive in pieces and in order. It does not depend on how the bytes are
    divided into pieces, nor on the device they are on.

    A piece that was just written is still in the processor's cache, where reading it costs a fifth of what it costs
    later.
    """

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._leaf = xxhash.xxh3_64()
        """State of the leaf that is not complete yet."""
        self._begun = 0
        """Bytes of that leaf so far."""

    def update(self, piece: torch.Tensor) -> None:
        """Add the bytes of a tensor of any dtype and shape, as if it were contiguous. Whole leaves of a tensor on a
        device are hashed there; only the ends are copied to the host."""
        flat = piece
        if piece.dtype != torch.uint8 or piece.ndim != 1 or not piece.is_contiguous():  # as pieces of buffers never are
            flat = piece.detach().contiguous().view(-1).view(torch.uint8)
        if flat.device.type == "cpu":
            self.update_bytes(flat.numpy().data)
        else:
            self.update_on_device(flat)

    def update_on_device(self, flat: UInt8[torch.Tensor, " bytes"]) -> None:
        """Add bytes on the device they are on. Works for host tensors too, but more slowly than `update_bytes`."""
        first = min(-self._begun % LEAF, len(flat))
        whole = (len(flat) - first) // LEAF * LEAF
        self.update_bytes(flat[:first].cpu().numpy().data)
        for part in flat[first : first + whole].split(_AT_ONCE):
            self._digest.update(leaves_on_device(part))
        self.update_bytes(flat[first + whole :].cpu().numpy().data)

    def update_bytes(self, piece: memoryview) -> None:
        """Add bytes on the host."""
        first = min(-self._begun % LEAF, len(piece))
        whole = first + (len(piece) - first) // LEAF * LEAF
        if first:
            self._begin(piece[:first])
        leaf = xxhash.xxh3_64_digest
        self._digest.update(b"".join([leaf(piece[at : at + LEAF]) for at in range(first, whole, LEAF)]))
        if whole < len(piece):
            self._begin(piece[whole:])

    def _begin(self, part: memoryview) -> None:
        """Add bytes to the leaf that is not complete yet."""
        self._leaf.update(part)
        self._begun += len(part)
        if self._begun == LEAF:
            self._digest.update(self._leaf.digest())
            self._leaf.reset()
            self._begun = 0

    def hex(self) -> str:
        digest = self._digest.copy()
        if self._begun:
            digest.update(self._leaf.digest())
        return digest.hexdigest()


def bucket_fingerprint(buffer: torch.Tensor) -> str:
    """Return the fingerprint of a whole tensor (padding included)."""
    fingerprint = Fingerprint()
    fingerprint.update(buffer)
    return fingerprint.hex()


def chain(fingerprints: Iterable[str]) -> str:
    """Return one fingerprint of the whole model from those of its buckets; swapping two buckets changes it."""
    digest = xxhash.xxh3_128()
    for fingerprint in fingerprints:
        digest.update(f"{fingerprint};".encode())
    return digest.hexdigest()


# xxh3-64 of exactly LEAF bytes, by the specification (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3
# Algorithm Description (for large inputs)"): blocks of 16 stripes of 8 words of 64 bits, little-endian.
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_P32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = np.array([_P32[2], _P64[0], _P64[1], _P64[2], _P64[3], _P32[1], _P64[4], _P32[0]], np.uint64)
_STRIPES, _LANES, _LOW = 16, 8, 0xFFFFFFFF
_BLOCK = 8 * _STRIPES * _LANES


def _words(offset: int) -> NDArray[np.uint64]:
    return np.frombuffer(_SECRET, "<u8", _LANES, offset)


def _keys(last: bool) -> NDArray[np.int64]:
    """[16, 8] keys that the words of a block are mixed with; the last stripe of the last block has a different key."""
    offsets = [8 * stripe for stripe in range(_STRIPES)]
    if last:
        offsets[-1] = len(_SECRET) - 64 - 7
    return np.stack([_words(offset) for offset in offsets]).view(np.int64)


def leaves_on_device(flat: UInt8[torch.Tensor, " bytes"]) -> bytes:
    """Return the xxh3-64 digests (8 bytes each, big-endian) of the leaves of `flat`, computed on its device;
    `len(flat)` is a multiple of `LEAF`. Sums need no order; only the 8 blocks of a leaf are processed one after
    another, for all leaves at once."""
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat.view(torch.int64).view(-1, LEAF // _BLOCK, _STRIPES, _LANES)
    blocks = [_keys(last=number == LEAF // _BLOCK - 1) for number in range(LEAF // _BLOCK)]
    mixed = words ^ torch.from_numpy(np.stack(blocks)).to(flat.device)
    high = (mixed >> 32).bitwise_and_(_LOW)
    sums = mixed.bitwise_and_(_LOW).mul_(high).sum(2)
    sums += words.sum(2).view(*sums.shape[:2], _LANES // 2, 2).flip(-1).view(sums.shape)
    return _finished(_scrambled(sums).cpu().numpy().view(np.uint64))


def _scrambled(sums: Int64[torch.Tensor, "leaves blocks lanes"]) -> Int64[torch.Tensor, "leaves lanes"]:
    """Return the state after the last block. int64 products and sums wrap around like those of uint64."""
    key = torch.from_numpy(_words(len(_SECRET) - 64).view(np.int64).copy()).to(sums.device)
    prime = torch.tensor(_P32[0], device=sums.device)
    state = torch.from_numpy(_START.view(np.int64)).to(sums.device) + sums[:, 0]
    for block in sums.unbind(1)[1:]:
        high = (state >> 47).bitwise_and_((1 << 17) - 1)
        state = torch.addcmul(block, state.bitwise_xor_(high).bitwise_xor_(key), prime)
    return state


def _finished(state: NDArray[np.uint64]) -> bytes:
    """[leaves, 8] -> digests: the lanes are multiplied in pairs to 128 bits and folded, followed by an avalanche."""
    pairs = (state ^ _words(11)).reshape(-1, _LANES // 2, 2)
    folded = _folded(pairs[:, :, 0], pairs[:, :, 1]).sum(1, dtype=np.uint64)
    digest = folded + np.uint64(LEAF * _P64[0] % 2**64)
    digest ^= digest >> np.uint64(37)
    digest *= np.uint64(0x165667919E3779F9)
    digest ^= digest >> np.uint64(32)
    return digest.astype(">u8").tobytes()


def _folded(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The low half of the 128-bit product xor its high half."""
    low, half = np.uint64(_LOW), np.uint64(32)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    across = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (across & low)
    return (a * b) ^ (a1 * b1 + (across >> half) + (other >> half))
