"""How fast the engines are with so many groups in flight, and what they and a learner come to together: curves, how
likely each is by what was measured, and the flow between the two. Pure: numbers go in, numbers come out.

A few steps say little of the engines: the lengths vary. So one curve of two numbers is not fitted, but many are
weighed: `[curve]` is the first axis of whatever follows from them, and the spread over it says how sure that is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

KNEES, BENDS = 28, (1.0, 4.0)
"""Of the curves: how many knees, up to far above what may be in flight, and how sharp they are."""
VARIES, LEAST_VARIES, PRIOR = 0.3, 0.02, 4
"""Variance of what a group makes, in groups: at first, at least, and of how many steps the first guess is worth."""
AS_FEW = 40
"""However many steps there are, they say no more than so many: the curve is not quite the engines'."""
UNLIKELY = 0.02
"""Below this share of the most likely one's weight a curve is left out."""
TOGETHER = 12.0
"""How sharply the slower of the two decides the rate, as the exponent of a mean."""


@dataclass(frozen=True, slots=True)
class Engines:
    """Curves, all `[curve]`. A group among n in flight takes `alone * (1 + (n / knee) ** bend) ** (1 / bend)` seconds:
    few are as fast as one; of many only the sum counts."""

    knee: Array
    bend: Array
    alone: Array
    """Seconds."""
    weight: Array
    """How likely; they sum to 1."""
    number: NDArray[np.intp]
    """Among all curves that were weighed."""

    @classmethod
    def fitted(cls, knee: Array, bend: Array, alone: Array, groups: Array, weight: Array) -> Engines:
        """From steps: `alone` is `[curve, step]`, see `alone_for`; `groups` made and `weight` are `[step]`."""
        seconds = (weight * alone).sum(1) / max((weight * groups).sum(), 1e-9)
        foretold = np.maximum(alone / seconds[:, None], 1e-9)
        wrong = (weight * (foretold - groups) ** 2 / foretold).sum(1)
        varies = (wrong.min() + PRIOR * VARIES) / (max(1.0, weight.sum() - 2) + PRIOR)
        varies = max(varies, LEAST_VARIES) * (1 + weight.sum() / AS_FEW)
        likely = np.exp((wrong.min() - wrong) / 2 / varies)
        kept = likely > UNLIKELY
        return cls(knee[kept], bend[kept], seconds[kept], likely[kept] / likely[kept].sum(), kept.nonzero()[0])

    def rate(self, in_flight: Array) -> Array:
        """`[curve, ...]` groups per second, of `[...]` in flight."""
        return speed(self.knee, self.bend, in_flight) / beside(self.alone, in_flight)

    def mean(self, values: Array) -> Array:
        """`[...]`, of `[curve, ...]`."""
        return (beside(self.weight, values[0]) * values).sum(0)

    def quantile(self, values: Array, share: float) -> Array:
        """`[...]`, of `[curve, ...]`: `share` of the curves, by weight, say less."""
        order = values.argsort(0)
        first = (self.weight[order].cumsum(0) >= share).argmax(0)
        return np.take_along_axis(np.take_along_axis(values, order, 0), first[None], 0)[0]


def curves(most_in_flight: int) -> tuple[Array, Array]:
    """Knee and bend, `[curve]`, of all that are weighed."""
    knees = np.geomspace(0.3, 8 * most_in_flight + 8, KNEES)
    return np.tile(knees, len(BENDS)), np.repeat(BENDS, KNEES)


def beside(curve: Array, values: Array) -> Array:
    """`[curve]` with as many axes more as `[...]` has."""
    return curve.reshape(-1, *[1] * values.ndim)


def speed(knee: Array, bend: Array, in_flight: Array) -> Array:
    """`[curve, ...]` groups per the seconds that one takes alone, of `[...]` in flight."""
    knee, bend = beside(knee, in_flight), beside(bend, in_flight)
    return in_flight / (1 + (in_flight / knee) ** bend) ** (1 / bend)


def alone_for(knee: Array, bend: Array, in_flight: dict[int, float]) -> Array:
    """`[curve]`: what is made in so many seconds by how many are in flight would take one group alone so long."""
    counts, seconds = np.array(list(in_flight), float), np.array(list(in_flight.values()))
    return speed(knee, bend, counts) @ seconds


def flow(
    engines: Engines, learner: float, batch: int, depth: Array, in_flight: Array, late: float
) -> tuple[Array, Array]:
    """What the bounds `depth` and `in_flight`, `[...]` both, come to with a learner that trains so many groups per
    second: the share of the time that it trains, and the groups in flight, `[curve, ...]` both.

    Of the window's groups neither those in training are in flight nor those that gather for the next batch, of which
    there are more and more until it is full. `late`: groups by which the window is smaller than it says.
    """
    window = (1 + depth) * batch - late
    gathered = (batch - 1) * np.array([1 / 6, 1 / 2, 5 / 6]).reshape(-1, *[1] * window.ndim)
    waits = np.clip(np.minimum(in_flight, window - gathered), 0, None)
    trains = np.clip(np.minimum(in_flight, window - batch - gathered), 0, None)
    while_waits, while_trains = engines.rate(waits).mean(1) / learner, engines.rate(trains).mean(1) / learner
    low, high = np.zeros(while_waits.shape), np.full(while_waits.shape, 1 - 1e-9)
    for _ in range(14):  # by halves: the engines make less, the more of the time is trained
        busy = (low + high) / 2
        made = (1 - busy) * while_waits + busy * while_trains
        enough = made > busy / (1 - busy**TOGETHER) ** (1 / TOGETHER)
        low, high = np.where(enough, busy, low), np.where(enough, high, busy)
    flying = (1 - busy) * waits.mean(0) + busy * trains.mean(0)
    return busy, flying * busy / np.maximum(made, 1e-12)
