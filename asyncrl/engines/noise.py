"""Counter-based random numbers: a draw is a pure function of (seed, member, position), never of its batch-mates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1


def mix(seed: int, *counters: int) -> int:
    """Return a 64-bit key from a seed and any counters (splitmix64 over them in turn)."""
    key = seed & _MASK
    for counter in counters:
        key = _scramble((key + 0x9E3779B97F4A7C15 * ((counter & _MASK) + 1)) & _MASK)
    return key


def mixes(seed: int, count: int) -> NDArray[np.uint64]:
    """Return [count] `mix(seed, counter)` for the counters from 0."""
    return _mixed(np.full(count, seed & _MASK, np.uint64), np.arange(count))


def _scramble(key: int) -> int:
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
    return key ^ (key >> 31)


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return [R] float64 in [0, 1) for [R] row keys at [R] positions."""
    return (_mixed(keys, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(keys: NDArray[np.uint64], counters: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`mix` of each key with its counter."""
    with np.errstate(over="ignore"):
        state = keys + np.uint64(0x9E3779B97F4A7C15) * (counters.astype(np.uint64) + np.uint64(1))
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))
