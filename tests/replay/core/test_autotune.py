"""The tuner beside engines and a learner of a few lines; beside the planner's in tests/planner/test_autotune.py."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from asyncrl.replay.core.autotune import MEASURED, Move, Tuner
from asyncrl.replay.core.forecast import Bounds, Limits, Seen

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
    for seed in range(60):
        made = plant(seed, deep=deep, noise=noise)
        limits, tuner = made.limits, Tuner(made.limits, made.bounds)
        made.run(tuner, 150)
        early = len(made.moves)
        made.run(tuner, 300, since=150)
        for _, move in made.moves:
            assert 0 <= move.bounds.pipeline_depth <= limits.deepest
            assert 1 <= move.bounds.max_in_flight <= limits.most_in_flight
            assert move.reason
        steps = [step for step, _ in made.moves]
        assert all(later - step > MEASURED for step, later in itertools.pairwise(steps)), "the rate limit"
        assert made.trained() >= 0.93 * made.best, (seed, made.bounds, limits)
        assert len(made.moves) - early <= (8 if noise else 6), (seed, made.moves[early:])


def test_of_two_that_are_about_as_good_it_stays_where_it_is() -> None:
    limits = Limits(groups_per_step=8, deepest=8, most_in_flight=64)
    made = Plant(alone=1.0, each=0.0, learner=20.5, limits=limits, bounds=Bounds(pipeline_depth=3, max_in_flight=20))
    made.run(Tuner(limits, made.bounds), 200)
    assert made.moves == []  # the learner waits 2.4 % of the time


def test_a_busy_learner_gives_up_a_depth_that_it_does_not_need() -> None:
    """With less in flight than the deadband asks for, but one depth less has room for what is there."""
    limits = Limits(groups_per_step=16, deepest=16, most_in_flight=272)
    made = Plant(alone=1.0, each=0.0, learner=118.0, limits=limits, bounds=Bounds(pipeline_depth=9, max_in_flight=142))
    made.run(Tuner(limits, made.bounds), 100)
    assert made.bounds == Bounds(pipeline_depth=8, max_in_flight=128) and len(made.moves) == 1


def test_a_run_that_has_changed_is_measured_anew() -> None:
    limits = Limits(groups_per_step=8, deepest=8, most_in_flight=64)
    made = Plant(alone=1.0, each=0.0, learner=10.0, limits=limits, bounds=Bounds(pipeline_depth=8, max_in_flight=64))
    tuner = Tuner(limits, made.bounds)
    made.run(tuner, 120)
    assert made.bounds.max_in_flight < 20
    made.learner = 40.0
    made.run(tuner, 120, since=120)
    assert made.trained() > 0.95 * made.best == 0.95 * 40.0
    made.alone = 4.0  # answers have become longer
    made.run(tuner, 200, since=240)
    assert made.trained() > 0.95 * made.best == 0.95 * 16.0


def test_what_was_seen_before_an_interruption_decides_nothing() -> None:
    limits = Limits(groups_per_step=8, deepest=8, most_in_flight=64)
    made = Plant(alone=1.0, each=0.0, learner=40.0, limits=limits, bounds=Bounds(pipeline_depth=0, max_in_flight=64))
    tuner = Tuner(limits, made.bounds)
    for _ in range(40):
        made.run(tuner, MEASURED)
        tuner.interrupted(others=True)
    assert made.moves == []


def test_epochs_last_as_long_as_heartbeats_need() -> None:
    limits = Limits(groups_per_step=8, deepest=8, most_in_flight=64, least_s=1e9)
    made = Plant(alone=1.0, each=0.0, learner=40.0, limits=limits, bounds=Bounds(pipeline_depth=0, max_in_flight=64))
    made.run(Tuner(limits, made.bounds), 100)
    assert made.moves == []
