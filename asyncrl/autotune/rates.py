"""Predicts the rate of the engines by the number of groups in flight, and the throughput of engines and learner
together: curves, their likelihood given the measurements, and the flow between both. Pure: numbers in, numbers out.

A few steps say little about the engines, since lengths vary. Instead of fitting one curve with two parameters, many are
weighted: `[curve]` is the first axis of every derived array, and the spread over it measures the uncertainty.
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
"""Number of knees of the curves, up to far above the limit on groups in flight; each with a sharp and a soft knee."""
VARIES, LEAST_VARIES, PRIOR = 0.3, 0.02, 4
"""Variance of the number of groups made, per group: prior, minimum, and the number of steps the prior counts for."""
AS_FEW = 40
"""Limit on the number of steps that the evidence counts as, since the curve is not exactly that of the engines."""
UNLIKELY = 0.02
"""Curves with a weight below this share of the most likely curve's are left out."""
FEW = 1 << 14
"""Array size below which computing all values is faster than finding the distinct ones."""
HALVES = 12
"""Number of bisections in the search for the share of the time in which the learner trains."""


@dataclass(frozen=True, slots=True)
class Engines:
    """Curves, all `[curve]`. A group among n in flight takes `alone * (1 + (n / knee) ** bend) ** (1 / bend)` seconds,
    with a bend of 4 if the knee is sharp, else 1: a few groups are as fast as one; with many, the total rate is
    constant."""

    knee: Array
    is_sharp: NDArray[np.bool_]
    alone: Array
    """Seconds that a group takes alone."""
    weight: Array
    """Likelihood of each curve; sums to 1."""
    number: NDArray[np.intp]
    """Index of each curve among all candidates."""

    @classmethod
    def fitted(cls, knee: Array, is_sharp: NDArray[np.bool_], alone: Array, groups: Array, weight: Array) -> Engines:
        """Fit to steps: `alone` is `[curve, step]`, see `alone_for`; `groups` (generated) and `weight` are `[step]`."""
        seconds = (weight * alone).sum(1) / max((weight * groups).sum(), 1e-9)
        foretold = np.maximum(alone / seconds[:, None], 1e-9)
        wrong = (weight * (foretold - groups) ** 2 / foretold).sum(1)
        varies = (wrong.min() + PRIOR * VARIES) / (max(1.0, weight.sum() - 2) + PRIOR)
        varies = max(varies, LEAST_VARIES) * (1 + weight.sum() / AS_FEW)
        likely = np.exp((wrong.min() - wrong) / 2 / varies)
        kept = likely > UNLIKELY
        return cls(knee[kept], is_sharp[kept], seconds[kept], likely[kept] / likely[kept].sum(), kept.nonzero()[0])

    def rate(self, in_flight: Array) -> Array:
        """Groups per second, `[curve, ...]`, with `in_flight`, `[...]`, groups in flight."""
        return speed(self.knee, self.is_sharp, in_flight) / beside(self.alone, in_flight)

    def mean(self, values: Array) -> Array:
        """The weighted mean over the curves, `[...]`, of `values`, `[curve, ...]`."""
        return (beside(self.weight, values[0]) * values).sum(0)

    def quantiles(self, values: Array, *shares: float) -> Iterator[Array]:
        """The weighted quantiles over the curves, `[...]` each, of `values`, `[curve, ...]`."""
        order = values.argsort(0)
        summed, values = self.weight[order].cumsum(0), np.take_along_axis(values, order, 0)
        for share in shares:
            yield np.take_along_axis(values, (summed >= share).argmax(0)[None], 0)[0]


def curves(most_in_flight: int) -> tuple[Array, NDArray[np.bool_]]:
    """Return the knees of all candidate curves, and whether each is sharp, `[curve]` both."""
    knees = np.geomspace(0.3, 8 * most_in_flight + 8, KNEES)
    return np.tile(knees, 2), np.repeat([False, True], KNEES)


def beside(curve: NDArray[Any], values: Array) -> NDArray[Any]:
    """Reshape `[curve]` to broadcast with `[curve, ...]`, given values `[...]`."""
    return curve.reshape(-1, *[1] * values.ndim)


def speed(knee: Array, is_sharp: NDArray[np.bool_], in_flight: Array) -> Array:
    """Groups finished, `[curve, ...]`, in the time that one takes alone, with `in_flight`, `[...]`, in flight."""
    over = in_flight / beside(knee, in_flight)
    square = over * over
    return in_flight / np.where(beside(is_sharp, in_flight), np.sqrt(np.sqrt(1 + square * square)), 1 + over)


def alone_for(knee: Array, is_sharp: NDArray[np.bool_], in_flight: dict[int, float]) -> Array:
    """Return the seconds, `[curve]`, that a single group in flight at a time would need for the work done in a step.
    `in_flight`: seconds by the number of groups in flight."""
    counts, seconds = np.array(list(in_flight), float), np.array(list(in_flight.values()))
    return speed(knee, is_sharp, counts) @ seconds


def sharply(share: Array, into: Array | None = None) -> Array:
    """Return the twelfth power, stored `into` an array if given. If two processes wait for each other, the joint rate
    as a share of the one's own rate and as a share of the other's have twelfth powers that sum to 1: it is nearly the
    slower one's rate. The exponent was found in simulated runs."""
    power = np.multiply(share, share, out=into)
    power *= share
    power *= power
    power *= power
    return power


def flow(
    engines: Engines, learner: float, batch: int, depth: Array, in_flight: Array, late: Array | float
) -> tuple[Array, Array]:
    """Predict, for the bounds `depth` and `in_flight`, `[...]` both, the share of the time in which the learner trains
    and the groups in flight, `[curve, ...]` both. `learner`: groups per second that it trains.

    The groups of the window that are in training are not in flight, nor are those gathered for the next batch, whose
    number grows until it is full. `late`: groups by which the window is effectively smaller.
    """
    window = (1 + depth) * batch - late
    gathered = (batch - 1) * np.array([1 / 6, 1 / 2, 5 / 6]).reshape(-1, *[1] * window.ndim)
    at_most = in_flight.reshape(1, *[1] * (window.ndim - in_flight.ndim), *in_flight.shape)
    fastest = engines.rate(at_most)

    def fed(room: Array) -> tuple[Array, Array]:
        """Groups per second, as a share of the learner's rate, and groups in flight."""
        room = np.maximum(room, 0)
        rates = np.minimum(fastest, engines.rate(room))  # at the smaller of both, since the rate increases
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
    """Return the share of the time in which the learner trains, `[...]`, and the rate of the engines over all the time.
    Arguments: the engines' rate while the learner waits and while it trains, as shares of the learner's rate."""
    low, part = np.zeros(while_waits.shape), 1.0
    busy, made, needed, rest = (np.empty(low.shape) for _ in range(4))
    for _ in range(HALVES):  # bisection: the more of the time is trained, the less the engines make
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
    """Return the distinct places among the `[...]` of `values`, all `[curve, ...]`, and for each place, `[...]`, the
    index of its equivalent among them. Places are equivalent if they equal the last place along an axis: there, more
    room has no effect."""
    shape = values[0].shape[1:]
    place = np.arange(math.prod(shape)).reshape(shape)
    for axis in range(len(shape)):
        last = [each.take([-1], axis + 1) for each in values]
        same = np.all([(each == end).all(0) for each, end in zip(values, last, strict=True)], 0)
        place = np.where(same, place.take([-1], axis), place)
    chosen, alike = np.unique(place, return_inverse=True)
    return chosen, alike.reshape(shape)
