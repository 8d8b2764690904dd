"""What a run would do with other bounds, from the steps that were measured. Pure: numbers go in, numbers come out.

The learner's rate is known: of a step, the seconds in which it did not wait. The engines' rate by how many groups are
in flight, and what the two come to together, is that of `rates`. From the groups in flight and in store follows how old
tokens get; how their ages are spread, and so how many get too old to be trained, is as it was where it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.replay.core.tuning.ages import Ages, Spread, pooled
from asyncrl.replay.core.tuning.rates import Array, Engines, alone_for, curves, flow, sharply

FORGETS, LEARNER_FORGETS = 0.996, 0.98
"""Weight of a step as against the one after it; the same of the learner's."""
UNEVEN, HELD_BACK = 0.1, 0.3
"""Weight of steps at depth 0 and at the deepest, where the engines' work is uneven; of those in which the depth holds
the engines back, who are then idle in turn. Both only where there are others."""
LATE, LATES, LATE_VARIES = 0.15, (-0.1, 0.0, 0.15, 0.3, 0.5, 0.75, 1.0), 0.3
"""Batches by which the window seems to be smaller than it is: what is taken for true at first, what may be, and how far
from the first that is likely."""
STEP_VARIES = 0.15
"""Of one step's share of the time that the learner is busy, standard deviation; what counts as one step more."""
IN_FLIGHT_AGE, AGE = 0.64, 0.3
"""Versions that a batch in flight adds to the mean staleness; what is there without any."""
AGES_DIFFER = 3.0
"""Factor that measured ages may be off from computed ones, at most."""
DEEPEST = 0.96
"""Of the tokens that the deepest is computed to make: only there are groups admitted to nobody but who serves the
newest version. Taken for true until it is measured."""
RECENT, TRIED, REMEMBERED = 12, 100, 300
"""Steps, at most: that are looked at together, among which others are that were tried of late, that count at all."""
WEIGHTS = tuple(FORGETS**place for place in range(REMEMBERED))
"""Of the steps, from the last one back."""
CHANGED = 1.5
"""Factor between the last steps and those before: the run has changed."""
PROVES = 5
"""Steps after which something is taken for measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the run's settings allow."""

    groups_per_step: int
    deepest: int
    """The most that `pipeline_depth` may be; older tokens are not trained."""
    most_in_flight: int
    least_s: float = 0.0
    """A decision rests on so many seconds at least: what is generated is told now and then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One trained step."""

    seconds: float
    """Since the one before."""
    waited_s: float
    """Of them, the learner had nothing to train."""
    in_flight: dict[int, float]
    """Seconds by how many groups were in flight."""
    generated: float
    """Tokens, by all engines."""
    trained: dict[int, int]
    """Tokens that bore a gradient, by their age in versions."""
    wasted: int
    """Tokens that were too old to."""

    @property
    def mean_in_flight(self) -> float:
        return sum(count * passed for count, passed in self.in_flight.items()) / self.seconds


def mean_in_flight(steps: Sequence[Seen]) -> float:
    return sum(seen.mean_in_flight * seen.seconds for seen in steps) / sum(seen.seconds for seen in steps)


class Bounds(NamedTuple):
    """What is moved."""

    pipeline_depth: int
    max_in_flight: int


@dataclass(frozen=True, slots=True)
class Row:
    """A step, and the bounds that were in force."""

    seen: Seen
    bounds: Bounds
    age: int
    """Steps since these bounds came into force."""
    flying: float
    """Groups in flight, mean."""
    tokens: int
    """Trained or too old to be."""
    spread: Spread
    alone: Array
    """`[curve]`, see `alone_for`."""

    @property
    def is_settled(self) -> bool:
        """Groups of before are through, but for a few."""
        return self.age > min(self.bounds.pipeline_depth, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What was measured at bounds; the youngest steps count most."""

    in_flight: float
    """Groups, the most that there may have been."""
    busy: float
    """Share of the time that the learner trained."""
    steps: float
    """How many there were, as many as they count."""
    error: float
    """Standard error of `busy`."""

    @classmethod
    def of(cls, in_flight: float, steps: Sequence[tuple[float, Seen]]) -> Known:
        """`steps` and how much each counts."""
        weight = np.array([each for each, _ in steps])
        seconds, waited = np.array([(seen.seconds, seen.waited_s) for _, seen in steps]).T
        busy, count = 1 - float(weight @ waited / (weight @ seconds)), float(weight.sum())
        varies = (weight @ (1 - waited / seconds - busy) ** 2 + STEP_VARIES**2) / (count + 1)
        return cls(in_flight=in_flight, busy=busy, steps=count, error=math.sqrt(varies / count))


@dataclass(frozen=True, slots=True)
class Grid:
    """All bounds that may be: arrays are `[depth, in_flight]`."""

    depth: Array
    """`[depth, 1]`"""
    most: Array
    """`[1, in_flight]` groups that may be in flight."""
    flying: Array
    """Groups in flight, mean over the time."""
    staleness: Array
    """Mean, in versions."""
    worth: Array
    """Tokens trained per second, as a share of the most that any bounds give; what is expected."""
    low: Array
    """Less only if what is known of the engines is off in an unlikely way."""
    high: Array
    """More only if it is; where fewer are in flight than where it was measured, no more than `worth` is there."""
    now: tuple[int, int]
    """Place of those in force."""

    def bounds(self, place: tuple[int, int]) -> Bounds:
        return Bounds(pipeline_depth=int(self.depth[place[0], 0]), max_in_flight=int(self.most[0, place[1]]))


class Forecast:
    """Told of every step."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._knee, self._is_sharp = curves(limits.most_in_flight)
        self._most = {max(1, round(each)) for each in np.geomspace(1, limits.most_in_flight, 36)}
        self.uneven = limits.deepest if limits.deepest > 1 else -1
        """The deepest, where it is another than the first."""
        self._rows: list[Row] = []
        self._fitted: Engines | None = None
        """Of these rows."""

    def note(self, seen: Seen, bounds: Bounds) -> None:
        """`bounds` were in force."""
        age = self._rows[-1].age + 1 if self._rows and self.bounds == bounds else 0
        self._most.add(bounds.max_in_flight)
        tokens = sum(seen.trained.values()) + seen.wasted
        spread = Spread.of(self.limits.deepest, seen.trained, seen.wasted)
        alone = alone_for(self._knee, self._is_sharp, seen.in_flight)
        self._rows.append(Row(seen, bounds, age, seen.mean_in_flight, tokens, spread, alone))
        del self._rows[:-REMEMBERED]
        self._fitted = None

    def forget(self, but: int = 0) -> None:
        """What was measured, `but` for the last steps."""
        self._rows = self._rows[len(self._rows) - but :]
        self._fitted = None

    @property
    def bounds(self) -> Bounds:
        """That are in force."""
        return self._rows[-1].bounds

    def recent(self) -> list[Seen]:
        return [row.seen for row in self._recent()]

    def _recent(self) -> list[Row]:
        return [row for row in self._rows[-RECENT:] if row.bounds == self.bounds]

    def tried(self) -> float:
        """Groups in flight, the most that were for a while of late; at depth 0 and at the deepest they tell little."""
        flying: dict[Bounds, list[float]] = {}
        for row in self._rows[-TRIED:]:
            if row.bounds.pipeline_depth not in (0, self.uneven):
                flying.setdefault(row.bounds, []).append(row.flying)
        return max((sum(each) / len(each) for each in flying.values() if len(each) >= PROVES - 1), default=0.0)

    def grid(self, unsure: float) -> Grid:
        """`unsure`: how likely less than low is, and more than high."""
        limits, batch = self.limits, self.limits.groups_per_step
        learner, engines = self._learner(), self._engines()
        depth = np.arange(limits.deepest + 1, dtype=float)[:, None]
        most = np.array(sorted(self._most), float)[None, :]
        places = self._places()
        known = self._known(places)
        late = self._late(engines, learner, known)
        busy, flying = flow(engines, learner, batch, depth, np.minimum(most, places), late)
        in_store = engines.mean(sharply(busy) * np.maximum(0, depth * batch - late - flying)) / batch
        mean_flying = engines.mean(flying)
        busy = self._as_known(busy, depth, most, known)
        aging = IN_FLIGHT_AGE * mean_flying / batch + AGE
        ages = {self._place(bounds, most): each for bounds, each in self._ages().items()}
        fresh = busy * (1 - pooled(ages, aging, in_store))
        if self.uneven > 0:
            fresh[:, self.uneven] *= self._deepest(engines, learner, known, late)
        worth = fresh / np.maximum(fresh.reshape(len(fresh), -1).max(1), 1e-9)[:, None, None]
        mean, (low, high) = engines.mean(worth), engines.quantiles(worth, unsure, 1 - unsure)
        for at, each in known.items():
            place = self._place(at, most)
            if each.steps >= PROVES - 1:  # with fewer in flight no more is hoped for than is expected there
                high = np.where(mean_flying <= mean_flying[place], np.minimum(high, mean[place]), high)
        now = self._place(self.bounds, most)
        differ = ages[now].mean / (aging + in_store)[now]
        return Grid(
            depth=depth,
            most=most,
            flying=mean_flying,
            staleness=(aging + in_store) * min(max(differ, 0.5), AGES_DIFFER),
            worth=mean,
            low=low,
            high=high,
            now=now,
        )

    @staticmethod
    def _place(bounds: Bounds, most: Array) -> tuple[int, int]:
        return bounds.pipeline_depth, int(np.searchsorted(most[0], bounds.max_in_flight))

    def _learner(self) -> float:
        """Groups per second that it trains while it does not wait."""
        weight = LEARNER_FORGETS ** np.arange(len(self._rows))[::-1]
        seconds = np.array([row.seen.seconds - row.seen.waited_s for row in self._rows])
        return self.limits.groups_per_step * float(weight.sum() / max((weight * seconds).sum(), 1e-9))

    def _engines(self) -> Engines:
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    def _fit(self) -> Engines:
        tokens = np.array([row.tokens for row in self._rows])
        groups = np.array([row.seen.generated for row in self._rows]) * self.limits.groups_per_step
        groups = groups * len(self._rows) / max(1, tokens.sum())
        alone = np.array([row.alone for row in self._rows]).T
        return Engines.fitted(self._knee, self._is_sharp, alone, groups, self._weights())

    def _weights(self) -> Array:
        """`[step]` of what they say of the engines."""
        weight = np.array(WEIGHTS[: len(self._rows)][::-1])
        uneven = np.array([row.bounds.pipeline_depth in (0, self.uneven) for row in self._rows])
        held = np.array([row.flying < 0.9 * row.bounds.max_in_flight for row in self._rows])
        if (~uneven).sum() >= PROVES:
            weight = np.where(uneven, UNEVEN * weight, weight)
        if (~uneven & ~held).sum() >= PROVES:
            weight = np.where(~uneven & held, HELD_BACK * weight, weight)
        return weight

    def _places(self) -> float:
        """Groups that the workers have places for, as far as more were allowed and the learner waited."""
        recent, bounds = self.recent(), self.bounds
        seconds = sum(seen.seconds for seen in recent)
        held: dict[int, float] = {}
        for seen in recent:
            for count, passed in seen.in_flight.items():
                held[count] = held.get(count, 0.0) + passed
        most = max((count for count, passed in held.items() if passed > 0.01 * seconds), default=1)
        allowed = min(bounds.max_in_flight, self.limits.groups_per_step * max(1, bounds.pipeline_depth))
        waits = sum(seen.waited_s for seen in recent) > 0.05 * seconds
        return float(max(1, most)) if waits and most < 0.9 * allowed else math.inf

    def _known(self, places: float) -> dict[Bounds, Known]:
        steps: dict[Bounds, list[tuple[float, Seen]]] = {}
        for weight, row in zip(WEIGHTS, reversed(self._rows), strict=False):
            if row.is_settled:
                steps.setdefault(row.bounds, []).append((weight, row.seen))
        return {at: Known.of(min(at.max_in_flight, places), each) for at, each in steps.items()}

    def _as_known(self, busy: Array, depth: Array, most: Array, known: dict[Bounds, Known]) -> Array:
        """`[curve, depth, in_flight]` share of the time that the learner trains: with more room than somewhere else no
        less than there, with less room no more; and where it was measured, what was, for it may be otherwise."""
        sure = [
            (at, each.busy - each.error, each.busy + each.error)
            for at, each in known.items()
            if each.steps >= PROVES - 1
        ]
        for at, low, high in sure:
            less = (depth <= at.pipeline_depth) & (most <= at.max_in_flight)
            more = (depth >= at.pipeline_depth) & (most >= at.max_in_flight) & (depth != self.uneven)
            clip(busy, less, 0.0, high)
            clip(busy, more, low, 1.0)
        for at, low, high in sure:
            there = (depth == at.pipeline_depth) & (most == at.max_in_flight) & (depth != self.uneven)
            clip(busy, there, low, high)
        return busy

    def _foretold(self, engines: Engines, learner: float, known: dict[Bounds, Known], late: Array | float) -> Array:
        """`[..., bounds]` share of the time that the learner trains, at those that are known; of `late` `[..., 1]`."""
        depth = np.array([bounds.pipeline_depth for bounds in known], float)
        most = np.array([each.in_flight for each in known.values()])
        return engines.mean(flow(engines, learner, self.limits.groups_per_step, depth, most, late)[0])

    def _late(self, engines: Engines, learner: float, known: dict[Bounds, Known]) -> float:
        """Groups: see `LATE`."""
        late, batch = np.array(LATES), self.limits.groups_per_step
        wrong = ((late - LATE) / LATE_VARIES) ** 2
        if known:
            busy, steps = (np.array([getattr(each, name) for each in known.values()]) for name in ("busy", "steps"))
            off = busy - self._foretold(engines, learner, known, late[:, None] * batch)
            wrong += (steps * off**2).sum(1) / STEP_VARIES**2
        return batch * LATES[int(wrong.argmin())]

    def _deepest(self, engines: Engines, learner: float, known: dict[Bounds, Known], late: float) -> float:
        """Of the tokens that the deepest is computed to make; none while nothing else was tried, which tells more."""
        if all(row.bounds.pipeline_depth == self.uneven for row in self._rows):
            return 0.0
        there = {at: each for at, each in known.items() if at.pipeline_depth == self.uneven and each.steps > PROVES}
        if not there:
            return DEEPEST
        busy = sum(each.steps * each.busy for each in there.values())
        steps = np.array([each.steps for each in there.values()])
        return float(np.clip(busy / (steps @ self._foretold(engines, learner, there, late)), 0.5, 1))

    def _ages(self) -> dict[Bounds, Ages]:
        """Of those in force the last few steps, if no others are there."""
        found: dict[Bounds, list[tuple[Spread, float]]] = {}
        for weight, row in zip(WEIGHTS, reversed(self._rows), strict=False):
            if row.age > row.bounds.pipeline_depth:
                found.setdefault(row.bounds, []).append((row.spread, weight))
        if self.bounds not in found:
            found[self.bounds] = [(row.spread, 1.0) for row in self._recent()[-3:]]
        return {at: Ages(self.limits.deepest, *zip(*each, strict=True)) for at, each in found.items()}

    def has_changed(self) -> bool:
        """Whether the last steps are unlike those before at the same bounds."""
        rows = [row for row in self._rows if row.bounds == self.bounds and row.is_settled]
        before, last = rows[:-RECENT], rows[-RECENT:]
        if len(before) < PROVES:
            return False
        engines = self._engines()

        def paces(rows: Sequence[Row]) -> tuple[float, float]:
            """Of the engines, as a multiple of what the curves say, and of the learner."""
            alone = np.array([row.alone for row in rows])[:, engines.number] / engines.alone
            foretold = sum(float(engines.weight @ each) for each in alone)
            busy = sum(row.seen.seconds - row.seen.waited_s for row in rows)
            return sum(row.seen.generated for row in rows) / max(foretold, 1e-9), len(rows) / max(busy, 1e-9)

        ratios = [max(now, 1e-9) / max(then, 1e-9) for now, then in zip(paces(last), paces(before), strict=True)]
        return not all(1 / CHANGED < ratio < CHANGED for ratio in ratios)


def clip(values: Array, where: NDArray[np.bool_], low: float, high: float) -> None:
    """In place: of `values`, `[curve, ...]`, those that `where`, `[...]`, says."""
    values[:, where] = values[:, where].clip(low, high)
