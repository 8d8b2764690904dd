"""Sums without an order, and an exponential without a library.

A float32 sum depends on the order of its terms, and the order on the number of rows, the threads and the vector units.
Integers below 2^53 have no order in float64: whatever adds them up, and in whichever blocks, gives the same number. So
terms are first rounded to a grid that is coarse enough for their sum to be exact (the idea of Ozaki et al., "Error-free
transformations of matrix multiplication", Numerical Algorithms 59, 2012, with one slice instead of several). What is
left is elementwise: IEEE 754 defines +, -, *, / and the root to the last bit, and each is an operation of its own here,
so that no compiler makes one of two. A library's exp is not so: ATen's differs between a vector's lanes and its tail.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

_EXPONENT = 0x7FF0000000000000
"""The bits of a float64 that are those of the largest power of two below it."""
_LN2_HIGH, _LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10
"""ln 2 in two parts; the first has so few bits that its products with an exponent are exact (fdlibm)."""
_LOWEST, _HIGHEST = -700.0, 700.0
"""exp beyond them is taken for that at them: 1e-304 and 1e304."""
_TERMS = 9
"""Of the series of exp within ln(2) / 2: the rest is below 2e-10, a hundredth of what a float32 resolves."""


def bits_for(terms: int) -> int:
    """Bits that both factors of so many products may have, so that their sum is exact in float64."""
    return (53 - math.ceil(math.log2(max(terms, 2)))) // 2


def power_below(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The largest powers of two that are at most the float64 `values` >= 0; 0 of 0."""
    return (values.view(torch.int64) & _EXPONENT).view(torch.float64)


def on_grid(values: Float[Tensor, "*rows n"], bits: int) -> Float[Tensor, "*rows n"]:
    """float64: each row rounded to multiples of 2^(1 - bits) times the power of two below its largest magnitude."""
    largest = power_below(values.abs().amax(-1, keepdim=True).double())
    # In [2^52, 2^53) units a float64 holds no fractions: adding the middle of it rounds, subtracting it gives it back.
    anchor = largest * (1.5 * 2.0 ** (53 - bits))
    return (values.double() + anchor).sub_(anchor)


def to_units(values: Float[Tensor, "*shape"], unit: float) -> Float[Tensor, "*shape"]:
    """float64 `values`, below 2^51 units, rounded to multiples of `unit`, a power of two."""
    anchor = 1.5 * 2.0**52 * unit
    return (values + anchor).sub_(anchor)


def exp(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """float64, to about 2e-10 of itself."""
    values = values.clamp(_LOWEST, _HIGHEST)
    power = (values * (1 / math.log(2))).round_()
    rest = (values - power * _LN2_HIGH).sub_(power * _LN2_LOW)
    series = torch.full_like(rest, 1 / math.factorial(_TERMS - 1))
    for degree in reversed(range(_TERMS - 1)):
        series.mul_(rest).add_(1 / math.factorial(degree))
    return series.mul_(((power.long() + 1023) << 52).view(torch.float64))


def log(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """float64, one after the other by the C library: of a number per token."""
    found = [math.log(value) for value in values.flatten().tolist()]
    return torch.tensor(found, dtype=torch.float64, device=values.device).view(values.shape)
