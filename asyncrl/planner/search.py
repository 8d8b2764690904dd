"""Searches for the best settings for a number of GPUs. A binary search by simulation finds the balanced split: if the
learner waits, ranks become engines. The splits around it are simulated with one depth after the other, and the best of
all also with fewer groups in flight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from asyncrl.planner.costs import Costs, Lengths
from asyncrl.planner.outcome import Outcome, simulate
from asyncrl.planner.simulation import Setup

NEAR_BEST = 0.99
"""Fraction of the best tokens/s above which results count as equal; then the lowest staleness decides."""
WAITS = 0.05
"""Share of the time: a learner that waits longer has too many ranks."""
CHANGES = (0.8, 1.25)
"""Factors applied to each cost for the sensitivity table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """GPUs of the learner and engines of the rollouts, in a combination that can be started."""

    ranks: int
    engines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    split: Split
    pipeline_depth: int
    max_in_flight: int
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is simulated."""

    steps: int
    warm_up: int
    splits: int
    """Number of splits around the balanced one that are simulated with every depth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    best: Tried
    tried: Sequence[Tried]
    sensitivity: dict[str, Tried]
    """The outcome of the same settings with one cost changed, by the name and size of the change."""


@dataclass(frozen=True, slots=True)
class Longer:
    """A distribution of lengths, scaled by a factor."""

    lengths: Lengths
    factor: float

    def draw(self, random: np.random.Generator, groups: int, members: int) -> NDArray[np.int64]:
        drawn = np.rint(self.lengths.draw(random, groups, members) * self.factor)
        return np.maximum(1, drawn).astype(np.int64)

    @property
    def mean(self) -> float:
        return self.lengths.mean * self.factor


class Search:
    """Searches for the best settings by simulation.

    Args:
        base: the settings of the run; the searched ones are replaced.
        slots: number of groups that one worker makes at once, as a function of (groups in flight, engines).
        most_in_flight: limit on the groups in flight; 0 for none.
    """

    def __init__(
        self,
        base: Setup,
        costs: Costs,
        slots: Callable[[int, int], int],
        effort: Effort,
        *,
        most_in_flight: int = 0,
        seed: int = 0,
    ) -> None:
        self._base, self._costs, self._slots, self._effort, self._seed = base, costs, slots, effort, seed
        self._most_in_flight = most_in_flight
        self._tried: dict[tuple[Split, int, int], Tried] = {}

    def plan(self, splits: Sequence[Split]) -> Plan:
        """Raises ConfigError if the settings of the run deadlock."""
        ordered = sorted(splits, key=lambda split: split.ranks)
        first = max(0, self._balanced(ordered) - self._effort.splits // 2)
        for split in ordered[first : first + self._effort.splits]:
            self._deepen(split)
        best = best_of(self._tried.values())
        for in_flight in self._fewer(best):
            self._try(best.split, best.pipeline_depth, in_flight)
        best = best_of(self._tried.values())
        return Plan(best=best, tried=[*self._tried.values()], sensitivity=self._sensitivity(best))

    def _balanced(self, splits: Sequence[Split]) -> int:
        """Index of the first split, by ranks, whose learner waits although the rollouts run as far ahead as allowed."""
        settings, low, high = self._base.settings, 0, len(splits) - 1
        deepest = settings.max_staleness - settings.bypass_steps
        in_flight = self._cap((1 + deepest) * settings.groups_per_step)
        while low < high:
            middle = (low + high) // 2
            found = self._try(splits[middle], deepest, in_flight).outcome
            low, high = (low, middle) if found.learner_idle > WAITS else (middle + 1, high)
        return low

    def _deepen(self, split: Split) -> None:
        """Simulate increasing depths until two in a row bring no gain."""
        settings = self._base.settings
        best, vain = 0.0, 0
        for depth in range(settings.max_staleness - settings.bypass_steps + 1):
            rate = self._try(split, depth, self._cap((1 + depth) * settings.groups_per_step)).outcome.tokens_per_s
            vain = 0 if rate * NEAR_BEST > best else vain + 1
            best = max(best, rate)
            if vain == 2:
                return

    def _cap(self, in_flight: int) -> int:
        return min(in_flight, self._most_in_flight) if self._most_in_flight else in_flight

    def _fewer(self, best: Tried) -> Iterable[int]:
        parts = (round(best.max_in_flight * share) for share in (0.35, 0.5, 0.7, 0.85))
        return sorted({part for part in parts if 1 <= part < best.max_in_flight})

    def _setup(self, split: Split, depth: int, in_flight: int) -> Setup:
        settings = replace(self._base.settings, pipeline_depth=depth, max_in_flight=in_flight)
        slots = self._slots(in_flight, split.engines)
        return replace(self._base, settings=settings, engines=split.engines, ranks=split.ranks, slots=slots)

    def _try(self, split: Split, depth: int, in_flight: int) -> Tried:
        key = split, depth, in_flight
        if key not in self._tried:
            self._tried[key] = self._simulated(*key, self._costs)
        return self._tried[key]

    def _simulated(self, split: Split, depth: int, in_flight: int, costs: Costs) -> Tried:
        setup, effort = self._setup(split, depth, in_flight), self._effort
        outcome = simulate(setup, costs, steps=effort.steps, warm_up=effort.warm_up, seed=self._seed)
        return Tried(split=split, pipeline_depth=depth, max_in_flight=in_flight, outcome=outcome)

    def _sensitivity(self, best: Tried) -> dict[str, Tried]:
        found = {}
        for name, change in changes(self._costs).items():
            for factor in CHANGES:
                costs = change(factor)
                found[f"{name} {factor - 1:+.0%}"] = self._simulated(
                    best.split, best.pipeline_depth, best.max_in_flight, costs
                )
        return found


def best_of(tried: Collection[Tried]) -> Tried:
    """The result with the lowest staleness among those with (nearly) the most trained tokens per second."""
    most = max(each.outcome.tokens_per_s for each in tried)
    near = [each for each in tried if each.outcome.tokens_per_s >= NEAR_BEST * most]
    return min(near, key=lambda each: (round(each.outcome.staleness_mean, 2), each.pipeline_depth, each.max_in_flight))


def changes(costs: Costs) -> dict[str, Callable[[float], Costs]]:
    """Functions that scale one cost by a factor, by name; costs of 0 are left out."""
    found: dict[str, Callable[[float], Costs]] = {
        "engine step": costs.slower,
        "completion length": lambda factor: replace(costs, lengths=Longer(costs.lengths, factor)),
        "train step": lambda factor: replace(costs, step_s=costs.step_s * factor, token_s=costs.token_s * factor),
        "weight update": lambda factor: replace(costs, sync_s=costs.sync_s * factor, stall_s=costs.stall_s * factor),
        "environment": lambda factor: replace(costs, environment_s=costs.environment_s * factor),
        "finished group": lambda factor: replace(
            costs, handle_s=costs.handle_s * factor, deliver_s=costs.deliver_s * factor
        ),
    }
    if not costs.sync_s and not costs.stall_s:
        del found["weight update"]
    if not costs.environment_s:
        del found["environment"]
    if not costs.handle_s and not costs.deliver_s:
        del found["finished group"]
    return found
