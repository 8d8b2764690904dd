"""Equal bytes have one fingerprint, however they are stored and cut; other bytes have another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.weights.fingerprint import LEAF, Fingerprint, bucket_fingerprint, leaves_on_device

EDGES = [k * LEAF + d for k in (1, 2, 3) for d in (-1, 0, 1)]
SIZES = st.one_of(st.integers(0, 40), st.integers(0, 3 * LEAF), st.sampled_from(EDGES))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool)


def drawn(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def by_definition(flat: torch.Tensor) -> str:
    data = flat.numpy().tobytes()
    leaves = (xxhash.xxh3_64_digest(data[start : start + LEAF]) for start in range(0, len(data), LEAF))
    return xxhash.xxh3_128_hexdigest(b"".join(leaves))


def taken(way: Callable[[Fingerprint, torch.Tensor], None], *pieces: torch.Tensor) -> str:
    fingerprint = Fingerprint()
    for piece in pieces:
        way(fingerprint, piece)
    return fingerprint.hex()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(SIZES, st.lists(st.integers(0, 3 * LEAF), max_size=4), st.integers(0, 9), st.data())
def test_it_is_the_same_however_the_bytes_are_cut_and_wherever_they_are_hashed(nbytes, cuts, offset, data):
    """`offset`: a view of a larger buffer need not begin at a word."""
    flat = drawn(offset + nbytes, nbytes)[offset:]
    ends = sorted(min(cut, nbytes) for cut in cuts)
    pieces = [flat[a:b] for a, b in zip([0, *ends], [*ends, nbytes], strict=True)]
    wanted = by_definition(flat)
    assert taken(Fingerprint.update, *pieces) == wanted
    assert taken(Fingerprint.update_on_device, *pieces) == wanted
    mixed = Fingerprint()
    for piece in pieces:
        (mixed.update_on_device if data.draw(st.booleans()) else mixed.update)(piece)
    assert mixed.hex() == mixed.hex() == wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (257, 1030)])
def test_of_any_dtype_and_shape_it_is_of_the_bytes(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    assert bucket_fingerprint(tensor) == by_definition(tensor.reshape(-1).view(torch.uint8))
    turned = tensor.transpose(0, 1)[::2] if tensor.ndim == 2 else tensor
    assert bucket_fingerprint(turned) == bucket_fingerprint(turned.clone(memory_format=torch.contiguous_format))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2 * LEAF - 1), st.integers(1, 255))
def test_any_other_byte_makes_it_another_one(place: int, change: int):
    flat = drawn(2 * LEAF, 3)
    before, leaves = bucket_fingerprint(flat), leaves_on_device(flat)
    flat[place] ^= change
    assert bucket_fingerprint(flat) != before
    changed = [a != b for a, b in zip(leaves, leaves_on_device(flat), strict=True)]
    assert any(changed[:8]) == (place < LEAF) and any(changed[8:]) == (place >= LEAF)


@pytest.mark.parametrize("bytes_of", [torch.zeros, torch.ones])
def test_the_words_that_carry_nowhere_and_everywhere_agree_too(bytes_of):
    """All bits 0, and with them 1: sums and products that wrap around."""
    flat = bytes_of(LEAF, dtype=torch.uint8) * 255
    assert leaves_on_device(flat) == xxhash.xxh3_64_digest(flat.numpy().tobytes())


def test_leaves_in_another_order_make_another_one():
    one, other = drawn(LEAF, 1), drawn(LEAF, 2)
    assert bucket_fingerprint(torch.cat([one, other])) != bucket_fingerprint(torch.cat([other, one]))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("leaves", [1, 64])
def test_a_piece_is_hashed_on_its_device_in_sixty_operations_whatever_its_size(leaves: int):
    """Each is a launch, with the interpreter lock held, in the process that generates."""
    with Operations() as operations:
        leaves_on_device(torch.zeros(leaves * LEAF, dtype=torch.uint8))
    assert operations.count <= 60
