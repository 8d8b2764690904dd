from __future__ import annotations

import itertools

import numpy as np
import pytest

from asyncrl.autotune.forecast import Bounds, Forecast, Limits, Seen, mean_in_flight

LIMITS = Limits(groups_per_step=8, deepest=8, most_in_flight=64)


def seen(*, busy: float = 1.0, flying: int = 16, seconds: float = 8.0, age: int = 1, wasted: int = 0) -> Seen:
    return Seen(
        seconds=seconds,
        waited_s=(1 - busy) * seconds,
        in_flight={flying: seconds},
        generated=8000.0,
        trained={age: 8000 - wasted},
        wasted=wasted,
    )


def told(steps: list[tuple[tuple[int, int], Seen]], limits: Limits = LIMITS) -> Forecast:
    found = Forecast(limits)
    for (depth, most), step in steps:
        found.note(step, Bounds(pipeline_depth=depth, max_in_flight=most))
    return found


def test_groups_in_flight_are_weighed_by_the_seconds() -> None:
    assert mean_in_flight([seen(flying=4, seconds=1.0), seen(flying=16, seconds=3.0)]) == pytest.approx(13.0)


def test_engines_that_are_not_fast_enough_are_expected_to_make_more_with_more_in_flight() -> None:
    grid = told([((3, 16), seen(busy=0.4))] * 20).grid(0.25)
    assert grid.bounds(grid.now) == Bounds(pipeline_depth=3, max_in_flight=16)
    best = np.unravel_index(grid.worth.argmax(), grid.worth.shape)
    assert grid.most[0, best[1]] > 32
    assert np.all(grid.low <= grid.high + 1e-9)
    assert 0.3 < grid.worth[grid.now] < 0.9


def test_a_busy_learner_is_expected_to_be_as_busy_with_less_in_store_and_fresher_tokens() -> None:
    grid = told([((7, 64), seen(age=6))] * 20).grid(0.25)
    assert grid.staleness[grid.now] == pytest.approx(6.0, rel=0.01), "as was measured"
    assert grid.worth[5, grid.now[1]] > 0.97
    assert grid.staleness[5, grid.now[1]] < 5.0


def test_where_tokens_are_wasted_deeper_is_worth_less() -> None:
    clean = told([((4, 32), seen(busy=0.9, flying=30, age=4))] * 20).grid(0.25)
    waste = told([((4, 32), seen(busy=0.9, flying=30, age=8, wasted=3000))] * 20).grid(0.25)
    assert waste.worth[7, -1] < clean.worth[7, -1]


def test_what_was_measured_limits_what_is_expected() -> None:
    """More room cannot make less, less room no more."""
    poor = [((2, 16), seen(busy=0.5))] * 40
    rich = [((4, 16), seen(busy=0.95))] * 40
    grid = told(poor + rich).grid(0.25)
    at = grid.now[1]
    assert grid.worth[2, at] < 0.65 and grid.worth[4, at] > 0.9


def test_where_it_was_measured_it_is_what_was_measured() -> None:
    """With longer tails more in flight may make less."""
    grid = told([((2, 12), seen(busy=0.93, flying=12))] * 30 + [((2, 21), seen(busy=0.8, flying=14))] * 60).grid(0.25)
    assert grid.worth[grid.now] < 0.9
    assert grid.worth[2, int(np.searchsorted(grid.most[0], 12))] > 0.9


def test_the_deepest_is_worth_nothing_until_something_else_was_tried() -> None:
    """Only there are groups admitted to nobody but who serves the newest version."""
    grid = told([((8, 64), seen())] * 6).grid(0.25)
    assert grid.worth[grid.now] == 0.0 and grid.worth[7, grid.now[1]] > 0.9
    grid = told([((8, 64), seen(busy=0.8)), ((7, 64), seen(busy=1.0))] * 6).grid(0.25)
    assert 0 < grid.worth[8, grid.now[1]] < 0.99
    only = told([((1, 64), seen())] * 6, Limits(groups_per_step=8, deepest=1, most_in_flight=64)).grid(0.25)
    assert only.worth[only.now] > 0.9


def test_a_run_has_changed_where_the_learner_or_the_engines_have() -> None:
    steady, bounds = [seen(busy=0.8)] * 40, (3, 16)
    for changed, is_it in ((seen(busy=0.8), False), (seen(busy=0.3), True), (seen(busy=0.8, seconds=16.0), True)):
        assert told([(bounds, step) for step in steady + [changed] * 12]).has_changed() == is_it
    moved = told([((2, 16), step) for step in steady] + [(bounds, seen(busy=0.3))] * 12)
    assert not moved.has_changed(), "other bounds are no other run"


def test_what_is_remembered_is_bounded() -> None:
    found = told(list(itertools.repeat(((3, 16), seen()), 1000)))
    assert len(found._rows) == 300
    found.forget(but=10)
    assert len(found._rows) == 10
    found.forget()
    assert not found._rows and found.tried() == 0.0
