"""How fast the engines are with so many groups in flight, and what they and a learner come to together: curves, how
likely each is by what was measured, and the flow between the two. Pure: numbers go in, numbers come out.

A few steps say little of the engines: the lengths vary. So one curve of two numbers is not fitted, but many are
weighed: `[curve]` is the first axis of whatever follows from them, and the spread over it says how sure that is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

KNEES = 28
"""Of the curves, up to far above what may be in flight; each is there with a sharp knee and with a soft one."""
VARIES, LEAST_VARIES, PRIOR = 0.3, 0.02, 4
"""Variance of what a group makes, in groups: at first, at least, and of how many steps the first guess is worth."""
AS_FEW = 40
"""However many steps there are, they say no more than so many: the curve is not quite the engines'."""
UNLIKELY = 0.02
"""Below this share of the most likely one's weight a curve is left out."""
FEW = 1 << 14
"""Numbers, of which it takes longer to find those that are alike than to compute with all."""
HALVES = 12
"""By which the share of the time that is trained is looked for."""


@dataclass(frozen=True, slots=True)
class Engines:
    """Curves, all `[curve]`. A group among n in flight takes `alone * (1 + (n / knee) ** bend) ** (1 / bend)` seconds,
    with a bend of 4 where the knee is sharp, else 1: few are as fast as one; of many only the sum counts."""

    knee: Array
    is_sharp: NDArray[np.bool_]
    alone: Array
    """Seconds."""
    weight: Array
    """How likely; they sum to 1."""
    number: NDArray[np.intp]
    """Among all curves that were weighed."""

    @classmethod
    def fitted(cls, knee: Array, is_sharp: NDArray[np.bool_], alone: Array, groups: Array, weight: Array) -> Engines:
        """From steps: `alone` is `[curve, step]`, see `alone_for`; `groups` made and `weight` are `[step]`."""
        seconds = (weight * alone).sum(1) / max((weight * groups).sum(), 1e-9)
        foretold = np.maximum(alone / seconds[:, None], 1e-9)
        wrong = (weight * (foretold - groups) ** 2 / foretold).sum(1)
        varies = (wrong.min() + PRIOR * VARIES) / (max(1.0, weight.sum() - 2) + PRIOR)
        varies = max(varies, LEAST_VARIES) * (1 + weight.sum() / AS_FEW)
        likely = np.exp((wrong.min() - wrong) / 2 / varies)
        kept = likely > UNLIKELY
        return cls(knee[kept], is_sharp[kept], seconds[kept], likely[kept] / likely[kept].sum(), kept.nonzero()[0])

    def rate(self, in_flight: Array) -> Array:
        """`[curve, ...]` groups per second, of `[...]` in flight."""
        return speed(self.knee, self.is_sharp, in_flight) / beside(self.alone, in_flight)

    def mean(self, values: Array) -> Array:
        """`[...]`, of `[curve, ...]`."""
        return (beside(self.weight, values[0]) * values).sum(0)

    def quantiles(self, values: Array, *shares: float) -> Iterator[Array]:
        """`[...]` each, of `[curve, ...]`: so large a share of the curves, by weight, say less."""
        order = values.argsort(0)
        summed, values = self.weight[order].cumsum(0), np.take_along_axis(values, order, 0)
        for share in shares:
            yield np.take_along_axis(values, (summed >= share).argmax(0)[None], 0)[0]


def curves(most_in_flight: int) -> tuple[Array, NDArray[np.bool_]]:
    """The knee of all that are weighed, and whether it is sharp, `[curve]` both."""
    knees = np.geomspace(0.3, 8 * most_in_flight + 8, KNEES)
    return np.tile(knees, 2), np.repeat([False, True], KNEES)


def beside(curve: NDArray[Any], values: Array) -> NDArray[Any]:
    """`[curve]` with as many axes more as `[...]` has."""
    return curve.reshape(-1, *[1] * values.ndim)


def speed(knee: Array, is_sharp: NDArray[np.bool_], in_flight: Array) -> Array:
    """`[curve, ...]` groups per the seconds that one takes alone, of `[...]` in flight."""
    over = in_flight / beside(knee, in_flight)
    square = over * over
    return in_flight / np.where(beside(is_sharp, in_flight), np.sqrt(np.sqrt(1 + square * square)), 1 + over)


def alone_for(knee: Array, is_sharp: NDArray[np.bool_], in_flight: dict[int, float]) -> Array:
    """`[curve]`: what is made in so many seconds by how many are in flight would take one group alone so long."""
    counts, seconds = np.array(list(in_flight), float), np.array(list(in_flight.values()))
    return speed(knee, is_sharp, counts) @ seconds


def sharply(share: Array, into: Array | None = None) -> Array:
    """The twelfth power, put `into` an array of its own. Where each of two waits for the other, it is 1 in all of what
    they come to as a share of the one's own rate and as a share of the other's: nearly the slower one's. So sharp it
    was found in simulated runs."""
    power = np.multiply(share, share, out=into)
    power *= share
    power *= power
    power *= power
    return power


def flow(
    engines: Engines, learner: float, batch: int, depth: Array, in_flight: Array, late: Array | float
) -> tuple[Array, Array]:
    """What the bounds `depth` and `in_flight`, `[...]` both, come to with a learner that trains so many groups per
    second: the share of the time that it trains, and the groups in flight, `[curve, ...]` both.

    Of the window's groups neither those in training are in flight nor those that gather for the next batch, of which
    there are more and more until it is full. `late`: groups by which the window is smaller than it says.
    """
    window = (1 + depth) * batch - late
    gathered = (batch - 1) * np.array([1 / 6, 1 / 2, 5 / 6]).reshape(-1, *[1] * window.ndim)
    at_most = in_flight.reshape(1, *[1] * (window.ndim - in_flight.ndim), *in_flight.shape)
    fastest = engines.rate(at_most)

    def fed(room: Array) -> tuple[Array, Array]:
        """Groups per second, as a share of the learner's, and in flight."""
        room = np.maximum(room, 0)
        rates = np.minimum(fastest, engines.rate(room))  # of the fewer, for more are faster
        return rates.mean(1) / learner, np.minimum(at_most, room).mean(0)

    while_waits, waits = fed(window - gathered)
    while_trains, trains = fed(window - batch - gathered)
    if while_waits.size < FEW:
        busy, made = trained(while_waits, while_trains)
    else:
        chosen, alike = distinct(while_waits, while_trains)
        found = trained(*(each.reshape(len(each), -1).take(chosen, 1) for each in (while_waits, while_trains)))
        busy, made = (each.take(alike, 1) for each in found)
    flying = (1 - busy) * waits + busy * trains
    return busy, flying * busy / np.maximum(made, 1e-12)


def trained(while_waits: Array, while_trains: Array) -> tuple[Array, Array]:
    """The share of the time that the learner trains, `[...]`, where engines make so much in the rest of it and in that,
    as shares of the learner's rate; and how much they make in all."""
    low, part = np.zeros(while_waits.shape), 1.0
    busy, made, needed, rest = (np.empty(low.shape) for _ in range(4))
    for _ in range(HALVES):  # the engines make less, the more of the time is trained
        part /= 2
        np.add(low, part, out=busy)
        np.subtract(1, busy, out=made)
        made *= while_waits
        made += np.multiply(busy, while_trains, out=rest)
        np.subtract(1, sharply(busy, needed), out=rest)
        rest *= sharply(made)
        np.copyto(low, busy, where=rest > needed)
    return busy, made


def distinct(*values: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Places among the `[...]` of `values`, all `[curve, ...]`, that are unlike each other, and for each place the
    number of that which is like it, `[...]`. Where more room is of no use, all have what the last place has that has
    the same of the one bound, or of the other."""
    shape = values[0].shape[1:]
    place = np.arange(math.prod(shape)).reshape(shape)
    for axis in range(len(shape)):
        last = [each.take([-1], axis + 1) for each in values]
        same = np.all([(each == end).all(0) for each, end in zip(values, last, strict=True)], 0)
        place = np.where(same, place.take([-1], axis), place)
    chosen, alike = np.unique(place, return_inverse=True)
    return chosen, alike.reshape(shape)
