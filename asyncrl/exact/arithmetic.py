"""Sums that do not depend on their order, and an exponential that does not depend on a library.

A float32 sum depends on the order of its terms, and that order on the number of rows, the threads and the SIMD width.
Sums of integers below 2^53 do not depend on the order in float64: any summation, in any blocks, gives the same number.
So terms are first rounded to a grid that is coarse enough for their sum to be exact (the idea of Ozaki et al.,
"Error-free transformations of matrix multiplication", Numerical Algorithms 59, 2012, with one slice instead of
several). The rest is elementwise: IEEE 754 defines +, -, *, / and the square root to the last bit, and each is a
separate operation here, so that no compiler fuses two. A library's exp is not defined so: ATen's differs between SIMD
lanes and the tail of a vector.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

_EXPONENT = 0x7FF0000000000000
"""Mask of the exponent bits of a float64: what remains is the largest power of two not above the number."""
_LN2_HIGH, _LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10
"""ln 2 as a sum of two parts; the first has few bits, so its products with an exponent are exact (fdlibm)."""
_LOWEST, _HIGHEST = -700.0, 700.0
"""exp is clamped to its values at these arguments: 1e-304 and 1e304."""
_TERMS = 9
"""Terms of the series of exp within ln(2) / 2. The rest is below 2e-10, a hundredth of the resolution of float32."""


def bits_for(terms: int) -> int:
    """Number of bits that both factors of `terms` products may have for their sum to be exact in float64."""
    return (53 - math.ceil(math.log2(max(terms, 2)))) // 2


def power_below(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The largest power of two that is at most each float64 of `values` >= 0; 0 for 0."""
    return (values.view(torch.int64) & _EXPONENT).view(torch.float64)


def on_grid(values: Float[Tensor, "*rows n"], bits: int) -> Float[Tensor, "*rows n"]:
    """Round each row, as float64, to multiples of 2^(1 - bits) times the power of two below its largest magnitude."""
    largest = power_below(values.abs().amax(-1, keepdim=True).double())
    # From 2^52 to 2^53 units a float64 has no fraction: adding the anchor rounds, subtracting it restores the value.
    anchor = largest * (1.5 * 2.0 ** (53 - bits))
    return (values.double() + anchor).sub_(anchor)


def to_units(values: Float[Tensor, "*shape"], unit: float) -> Float[Tensor, "*shape"]:
    """Round float64 `values`, below 2^51 units, to multiples of `unit`, a power of two."""
    anchor = 1.5 * 2.0**52 * unit
    return (values + anchor).sub_(anchor)


def exp(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Exponential in float64, with a relative error of about 2e-10."""
    values = values.clamp(_LOWEST, _HIGHEST)
    power = (values * (1 / math.log(2))).round_()
    rest = (values - power * _LN2_HIGH).sub_(power * _LN2_LOW)
    series = torch.full_like(rest, 1 / math.factorial(_TERMS - 1))
    for degree in reversed(range(_TERMS - 1)):
        series.mul_(rest).add_(1 / math.factorial(degree))
    return series.mul_(((power.long() + 1023) << 52).view(torch.float64))


def log(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Logarithm in float64, computed one number at a time by the C library; for one number per token."""
    found = [math.log(value) for value in values.flatten().tolist()]
    return torch.tensor(found, dtype=torch.float64, device=values.device).view(values.shape)
