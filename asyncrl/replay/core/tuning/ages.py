"""How old tokens get, by how they were spread over ages where it was measured. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.replay.core.tuning.rates import Array

ALIKE = 2
"""Exponent of the factor between two mean stalenesses: by so much less the one tells how ages are at the other."""
STEEP = 0.9
"""Of the tokens that are too old, the share that is a good deal older still is at most so many times as much."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Tokens of one step, `[part]` both."""

    ages: NDArray[np.intp]
    """In versions; the last one that there is for those that were too old to be trained."""
    counts: Array

    @classmethod
    def of(cls, oldest: int, trained: Mapping[int, int], wasted: int) -> Spread:
        ages = [min(age, oldest + 1) for age in trained]
        return cls(np.array([*ages, oldest + 1]), np.array([*trained.values(), wasted], float))


class Ages:
    """Tokens by their age, of some steps and how much each counts."""

    def __init__(self, oldest: int, steps: Sequence[Spread], weights: Sequence[float]) -> None:
        ages = np.concatenate([step.ages for step in steps])
        counts = np.concatenate([step.counts for step in steps])
        self.tokens = np.bincount(ages, np.repeat(weights, [len(step.ages) for step in steps]) * counts, oldest + 2)
        """`[age]`"""
        self.steps = sum(weights)

    @property
    def mean(self) -> float:
        return float(self.tokens @ np.arange(len(self.tokens))) / max(1.0, self.tokens.sum())

    def wasted(self, aging: Array, later: Array) -> Array:
        """`[...]` share of the tokens that would be too old if they aged `aging` times as fast and were trained `later`
        versions later. Of those that are too old it is not told by how much: they fall off as those below do."""
        oldest = len(self.tokens) - 2
        older = self.tokens[::-1].cumsum()[::-1] / max(1.0, self.tokens.sum())
        """`[age]` share that is as old as that, or older; so older than the age before."""
        bound = (oldest - later) / aging
        before = np.arange(-1, oldest + 1)
        most, fewer = max(older[-1], 1e-9), max(np.interp(0.7 * oldest, before, older), 1e-9)
        beyond = most * min(most / fewer, STEEP) ** (np.maximum(0, bound - oldest) / max(0.3 * oldest, 0.5))
        return np.where(bound > oldest, beyond, np.interp(bound, before, older))


def pooled(found: Mapping[tuple[int, int], Ages], aging: Array, in_store: Array) -> Array:
    """`[depth, in_flight]` share of the tokens that would be too old, by what was `found` at some places of the grid.
    `aging` and `in_store` are versions that tokens get older in flight and in store, `[depth, in_flight]` both."""
    wasted, weights = np.zeros(aging.shape), np.zeros(aging.shape)
    staleness = aging + in_store
    for place, ages in found.items():
        ratio = staleness / staleness[place]
        weight = ages.steps * np.minimum(ratio, 1 / ratio) ** ALIKE
        wasted += weight * ages.wasted(aging / aging[place], in_store - in_store[place])
        weights += weight
    return wasted / weights
