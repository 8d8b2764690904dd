"""Between what ends a mean over a few rows lies: an interval with a width for one row, too, and for rows that agree.

Drawing rows again, or a normal approximation, calls the mean of one row, or of eight right answers, exactly known. Of
scores with a known range two rows at each end of it are counted beside those that there are ("plus four": Agresti and
Coull 1998, here with the variance of the scores themselves, which for answers that are right or wrong is theirs). Of
others Student's t is taken; where all are the same value nothing is known, and no interval told.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
Z = 1.959963985
"""Of a normal distribution `CONFIDENCE` lies within so many deviations."""
T = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814)
"""Of Student's distribution, by degrees of freedom from 1 on."""
AT_EACH_END = 2
Range = tuple[float, float]
SHARE: Range = (0.0, 1.0)


def range_of(scores: NDArray[np.float64]) -> Range | None:
    """What scores [R] may be, as far as they tell: from 0 to 1, or from -1 to 1; None where one lies outside."""
    low, high = float(scores.min()), float(scores.max())
    return None if low < -1.0 or high > 1.0 else (0.0 if low >= 0.0 else -1.0, 1.0)


def interval(parts: NDArray[np.float64], sizes: NDArray[np.float64], within: Range | None) -> Range | None:
    """Of the sum of `parts` [R] over the sum of `sizes` [R], all above 0: a mean over tokens of rows that are drawn
    whole, or with sizes of 1 one over rows. `within`: what a part may be for each of its size; None: anything. None
    where rows say nothing."""
    value = parts.sum() / sizes.sum()
    rows = len(parts)
    if within is None:
        off = parts - value * sizes
        spread = math.sqrt(float(np.square(off).sum()))
        if rows < 2 or spread <= 1e-12 * float(np.abs(parts).sum()):
            return None
        half = student(rows - 1) * spread * math.sqrt(rows / (rows - 1)) / sizes.sum()
        return float(value - half), float(value + half)
    usual = np.full(AT_EACH_END, sizes.mean())
    parts = np.concatenate([parts, within[0] * usual, within[1] * usual])
    sizes = np.concatenate([sizes, usual, usual])
    middle = parts.sum() / sizes.sum()
    half = Z * math.sqrt(float(np.square(parts - middle * sizes).sum())) / sizes.sum()
    low, high = max(within[0], middle - half), min(within[1], middle + half)
    return float(min(low, value)), float(max(high, value))


def student(freedom: int) -> float:
    """The 97.5 % point of Student's distribution: of more than `len(T)` degrees of freedom by its expansion around the
    normal one (Abramowitz and Stegun 26.7.5), to 1e-3."""
    if freedom <= len(T):
        return T[freedom - 1]
    first = (Z**3 + Z) / 4
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / freedom + second / freedom**2 + third / freedom**3
