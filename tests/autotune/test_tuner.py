"""The tuner beside engines and a learner of a few lines; beside the planner's in tests/planner/test_autotune.py."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from asyncrl.autotune.forecast import Bounds, Limits, Seen
from asyncrl.autotune.rates import Engines
from asyncrl.autotune.tuner import MEASURED, Move, Tuner

GROUP = 1000
"""Tokens."""


@dataclass
class Plant:
    """Engines that make `n / (alone + each * n)` groups per second of n in flight, a learner that trains `learner`."""

    alone: float
    each: float
    learner: float
    limits: Limits
    bounds: Bounds
    noise: float = 0.0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    moves: list[tuple[int, Move]] = field(default_factory=list)

    def rate(self, in_flight: float) -> float:
        return in_flight / (self.alone + self.each * in_flight)

    def at(self, bounds: Bounds) -> tuple[float, float, float]:
        """Seconds of a step, groups in flight, groups in store."""
        batch = self.limits.groups_per_step
        room = bounds.pipeline_depth * batch
        trains = batch / self.learner
        meanwhile, then = (min(bounds.max_in_flight, groups) for groups in (room, room + batch))
        if self.rate(meanwhile) >= self.learner:
            flying = self.alone * self.learner / (1 - self.each * self.learner)
            return trains, flying, max(0.0, room - flying)
        waits = (batch - self.rate(meanwhile) * trains) / self.rate(then)
        return trains + waits, (trains * meanwhile + waits * then) / (trains + waits), 0.0

    def trained(self, bounds: Bounds | None = None) -> float:
        """Groups per second."""
        return self.limits.groups_per_step / self.at(bounds or self.bounds)[0]

    @property
    def best(self) -> float:
        """At a depth one less than the deepest: a last one is not worth that nobody but who serves the newest version
        gets an order."""
        depth = self.limits.deepest - (self.limits.deepest > 1)
        return self.trained(Bounds(pipeline_depth=depth, max_in_flight=self.limits.most_in_flight))

    def step(self) -> Seen:
        batch = self.limits.groups_per_step
        seconds, flying, store = self.at(self.bounds)
        tokens = batch * GROUP * (1 + self.noise * self.random.uniform(-1, 1))
        part = flying - math.floor(flying)
        age = min(round((flying / 2 + store) / batch), self.limits.deepest)
        return Seen(
            seconds=seconds,
            waited_s=seconds - batch / self.learner,
            in_flight={math.floor(flying): seconds * (1 - part), math.floor(flying) + 1: seconds * part},
            generated=tokens,
            trained={age: round(tokens)},
            wasted=0,
        )

    def run(self, tuner: Tuner, steps: int, since: int = 0) -> None:
        for step in range(since, since + steps):
            move = tuner.step(self.step())
            if move is not None:
                self.bounds = move.bounds
                self.moves.append((step, move))


def bounds(pipeline_depth: int, max_in_flight: int) -> Bounds:
    return Bounds(pipeline_depth=pipeline_depth, max_in_flight=max_in_flight)


def plant(seed: int, *, deep: bool, noise: float = 0.0) -> Plant:
    random = np.random.default_rng(seed)
    limits = Limits(
        groups_per_step=int(random.integers(1, 33)),
        deepest=int(random.integers(1, 17)),
        most_in_flight=int(random.integers(1, 257)),
    )
    alone, each = float(random.uniform(0.1, 10)), float(random.uniform(0, 0.1))
    fastest = limits.most_in_flight / (alone + each * limits.most_in_flight)
    begin = Bounds(pipeline_depth=limits.deepest if deep else 0, max_in_flight=limits.most_in_flight)
    learner = fastest * float(random.uniform(0.2, 3))
    return Plant(alone=alone, each=each, learner=learner, limits=limits, bounds=begin, noise=noise, random=random)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_it_comes_near_the_best_stays_within_the_limits_and_comes_to_rest(deep: bool, noise: float) -> None:
    for seed in range(10):
        made = plant(seed, deep=deep, noise=noise)
        limits, tuner = made.limits, Tuner(made.limits, made.bounds)
        made.run(tuner, 100)
        early = len(made.moves)
        made.run(tuner, 150, since=100)
        for _, move in made.moves:
            assert 0 <= move.bounds.pipeline_depth <= limits.deepest
            assert 1 <= move.bounds.max_in_flight <= limits.most_in_flight
            assert move.reason
        steps = [step for step, _ in made.moves]
        assert all(later - step > MEASURED for step, later in itertools.pairwise(steps)), "the rate limit"
        assert made.trained() >= 0.93 * made.best, (seed, made.bounds, limits)
        assert len(made.moves) - early <= 6, (seed, made.moves[early:])


def moved(made: Plant, steps: int) -> Plant:
    made.run(Tuner(made.limits, made.bounds), steps)
    return made


LIMITS = Limits(groups_per_step=8, deepest=8, most_in_flight=64)


def test_a_busy_learner_gives_up_the_depth_and_the_groups_that_it_does_not_need() -> None:
    """It needs 10 groups in flight beside those that gather: two batches."""
    made = moved(Plant(alone=1.0, each=0.0, learner=10.0, limits=LIMITS, bounds=bounds(7, 64)), 100)
    assert made.trained() > 0.95 * made.best
    assert made.bounds.pipeline_depth <= 3


def test_a_learner_that_waits_gets_what_it_needs_and_not_all() -> None:
    made = moved(Plant(alone=1.0, each=0.0, learner=20.0, limits=LIMITS, bounds=bounds(0, 64)), 100)
    assert made.trained() > 0.95 * made.best
    assert 2 <= made.bounds.pipeline_depth <= 4


def test_engines_that_many_groups_make_no_faster_get_few() -> None:
    """From 20 groups on they make 9 of 10 that they can make at all, which the learner could train twice as fast."""
    made = moved(Plant(alone=0.2, each=0.1, learner=20.0, limits=LIMITS, bounds=bounds(7, 64)), 200)
    assert made.trained() > 0.93 * made.best
    assert made.bounds.max_in_flight <= 48
    assert len(made.moves) <= 5, "what was found to be too few is not tried again and again"


@pytest.mark.parametrize("learner", [5.0, 20.0, 60.0])
def test_on_a_steady_workload_it_comes_to_rest_and_looks_again_once_at_most(learner: float) -> None:
    made = Plant(alone=1.0, each=0.01, learner=learner, limits=LIMITS, bounds=bounds(0, 64))
    tuner = Tuner(LIMITS, made.bounds)
    made.run(tuner, 150)
    found = made.bounds
    made.run(tuner, 300, since=150)
    assert made.bounds == found
    assert sum(step >= 150 for step, _ in made.moves) <= 2, "there and back"


def test_after_each_move_the_next_one_has_to_wait_longer() -> None:
    """Whatever is measured: here, anything."""
    random = np.random.default_rng(0)
    tuner, steps = Tuner(LIMITS, bounds(0, 64)), []
    for step in range(600):
        seconds, count = float(random.uniform(1, 9)), int(random.integers(1, 64))
        tokens = int(random.integers(1, 9000))
        seen = Seen(
            seconds=seconds,
            waited_s=seconds * float(random.uniform(0, 0.07)),
            in_flight={count: seconds},
            generated=float(random.integers(1, 9000)),
            trained={int(random.integers(0, 9)): tokens},
            wasted=int(random.integers(0, tokens)),
        )
        if tuner.step(seen) is not None:
            steps.append(step)
    assert steps and len(steps) < 25


def test_a_run_that_has_changed_is_measured_anew() -> None:
    made = Plant(alone=1.0, each=0.0, learner=10.0, limits=LIMITS, bounds=bounds(8, 64))
    tuner = Tuner(LIMITS, made.bounds)
    made.run(tuner, 120)
    assert made.bounds.max_in_flight < 20
    made.learner = 40.0
    made.run(tuner, 120, since=120)
    assert made.trained() > 0.95 * made.best
    made.alone = 4.0  # answers have become longer
    made.run(tuner, 200, since=240)
    assert made.trained() > 0.95 * made.best


def test_what_was_seen_before_an_interruption_decides_nothing() -> None:
    made = Plant(alone=1.0, each=0.0, learner=40.0, limits=LIMITS, bounds=bounds(0, 64))
    tuner = Tuner(LIMITS, made.bounds)
    for _ in range(40):
        made.run(tuner, MEASURED)
        tuner.interrupted(others=True)
    assert made.moves == []


def test_the_steps_after_an_interruption_are_not_looked_at() -> None:
    """A learner that was restored trains what was ready; nothing of it is in what is decided later."""
    made = Plant(alone=1.0, each=0.0, learner=40.0, limits=LIMITS, bounds=bounds(0, 64))
    undisturbed = Plant(alone=1.0, each=0.0, learner=40.0, limits=LIMITS, bounds=bounds(0, 64))
    tuner = Tuner(LIMITS, made.bounds)
    made.run(tuner, 4)
    tuner.interrupted()
    for _ in range(2):
        strange = Seen(seconds=1e-3, waited_s=0.0, in_flight={1: 1e-3}, generated=1e9, trained={8: 1}, wasted=9)
        assert tuner.step(strange) is None
    made.run(tuner, 60)
    undisturbed.run(Tuner(LIMITS, undisturbed.bounds), 64)
    assert made.bounds == undisturbed.bounds
    assert [move.bounds for _, move in made.moves] == [move.bounds for _, move in undisturbed.moves]


def test_a_decision_rests_on_as_many_seconds_as_heartbeats_need() -> None:
    limits = Limits(groups_per_step=8, deepest=8, most_in_flight=64, least_s=1e9)
    assert moved(Plant(alone=1.0, each=0.0, learner=40.0, limits=limits, bounds=bounds(0, 64)), 100).moves == []


def test_a_decision_weighs_the_curves_of_the_engines_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, weighed, fitted = plant(0, deep=False), [], Engines.fitted
    monkeypatch.setattr(Engines, "fitted", lambda *given: weighed.append(1) or fitted(*given))
    made.run(Tuner(made.limits, made.bounds), 1 + 4 * MEASURED)
    assert len(weighed) <= 4
