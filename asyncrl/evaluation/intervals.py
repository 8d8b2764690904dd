"""Confidence intervals of a mean over few rows, with a nonzero width even for one row or for rows that all agree.

A bootstrap or a normal approximation would call the mean of one row, or of eight right answers, exactly known. For
scores with a known range, two imaginary rows at each end of the range are added ("plus four", Agresti and Coull 1998;
here with the variance of the scores themselves, which equals theirs for right-or-wrong answers). For other scores
Student's t is used; if they all have the same value, there is no interval.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
Z = 1.959963985
"""`CONFIDENCE` of a normal distribution lies within this many standard deviations."""
T = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814)
"""The same for Student's t distribution, for 1, 2, 3... degrees of freedom."""
AT_EACH_END = 2
Range = tuple[float, float]
SHARE: Range = (0.0, 1.0)


def range_of(scores: NDArray[np.float64]) -> Range | None:
    """The range of possible scores, guessed from scores [R]: 0 to 1, or -1 to 1; None if one lies outside of both."""
    low, high = float(scores.min()), float(scores.max())
    return None if low < -1.0 or high > 1.0 else (0.0 if low >= 0.0 else -1.0, 1.0)


def interval(parts: NDArray[np.float64], sizes: NDArray[np.float64], within: Range | None) -> Range | None:
    """Confidence interval of sum(parts) / sum(sizes), for parts [R] and sizes [R] above 0. Rows are the sampling unit:
    this is a mean over tokens, or with sizes of 1 a mean over rows.

    Args:
        within: the range of `parts / sizes`; None if unbounded.

    Returns:
        None if the rows do not determine an interval.
    """
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
    """The 97.5 % quantile of Student's t distribution. Above `len(T)` degrees of freedom by its expansion around the
    normal quantile (Abramowitz and Stegun 26.7.5), accurate to 1e-3."""
    if freedom <= len(T):
        return T[freedom - 1]
    first = (Z**3 + Z) / 4
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / freedom + second / freedom**2 + third / freedom**3
