"""Predicts the ages of tokens from their measured age distribution. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.autotune.rates import Array

ALIKE = 2
"""Exponent of the ratio of two mean stalenesses, in the weight that ages measured at the one have at the other."""
STEEP = 0.9
"""Upper limit on the factor by which the share of too-old tokens is multiplied per 0.3 * `oldest` versions of age."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Age distribution of the tokens of one step, `[part]` both."""

    ages: NDArray[np.intp]
    """Ages in versions; `oldest + 1` for tokens that were too old to be trained."""
    counts: Array
    """Tokens of each age."""

    @classmethod
    def of(cls, oldest: int, trained: Mapping[int, int], wasted: int) -> Spread:
        ages = [min(age, oldest + 1) for age in trained]
        return cls(np.array([*ages, oldest + 1]), np.array([*trained.values(), wasted], float))


class Ages:
    """Tokens by age, summed over steps with the weight of each."""

    def __init__(self, oldest: int, steps: Sequence[Spread], weights: Sequence[float]) -> None:
        ages = np.concatenate([step.ages for step in steps])
        counts = np.concatenate([step.counts for step in steps])
        self.tokens = np.bincount(ages, np.repeat(weights, [len(step.ages) for step in steps]) * counts, oldest + 2)
        """Weighted tokens, `[age]`."""
        self.steps = sum(weights)

    @property
    def mean(self) -> float:
        return float(self.tokens @ np.arange(len(self.tokens))) / max(1.0, self.tokens.sum())

    def wasted(self, aging: Array, later: Array) -> Array:
        """Return the share of tokens, `[...]`, that would be too old if they aged `aging` times as fast and were
        trained `later` versions later. By how much over-age tokens exceed the bound is not known: their distribution
        is extrapolated from that of the ages just below it."""
        oldest = len(self.tokens) - 2
        older = self.tokens[::-1].cumsum()[::-1] / max(1.0, self.tokens.sum())
        """Share of tokens of that age or older, `[age]`; in other words, older than the preceding age."""
        bound = (oldest - later) / aging
        before = np.arange(-1, oldest + 1)
        most, fewer = max(older[-1], 1e-9), max(np.interp(0.7 * oldest, before, older), 1e-9)
        beyond = most * min(most / fewer, STEEP) ** (np.maximum(0, bound - oldest) / max(0.3 * oldest, 0.5))
        return np.where(bound > oldest, beyond, np.interp(bound, before, older))


def pooled(found: Mapping[tuple[int, int], Ages], aging: Array, in_store: Array) -> Array:
    """Return the share of tokens, `[depth, in_flight]`, that would be too old, given the ages `found` at some places of
    the grid. `aging` and `in_store`: versions by which tokens age in flight and in store, `[depth, in_flight]` both."""
    wasted, weights = np.zeros(aging.shape), np.zeros(aging.shape)
    staleness = aging + in_store
    for place, ages in found.items():
        ratio = staleness / staleness[place]
        weight = ages.steps * np.minimum(ratio, 1 / ratio) ** ALIKE
        wasted += weight * ages.wasted(aging / aging[place], in_store - in_store[place])
        weights += weight
    return wasted / weights
