"""The regression line through steps, computed from their sums alone."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.pace import PACES, Pace


def of_steps(rows: np.ndarray, seconds: np.ndarray) -> Pace:
    pace = Pace()
    for count, took in zip(rows.tolist(), seconds.tolist(), strict=True):
        pace.add(count, took)
    return pace


def test_the_line_is_that_of_least_squares_over_all_the_steps() -> None:
    random = np.random.default_rng(0)
    rows = random.integers(1, 300, 500)
    seconds = 0.004 + 2e-5 * rows + 1e-3 * random.random(500)
    each, fixed = np.polyfit(rows.astype(np.float64), seconds, 1)
    assert of_steps(rows, seconds).line() == pytest.approx((fixed, each), rel=1e-6)
    halves = of_steps(rows[:200], seconds[:200]) + of_steps(rows[200:], seconds[200:])
    assert halves.line() == pytest.approx((fixed, each), rel=1e-6)
    later = of_steps(rows, seconds) - of_steps(rows[:200], seconds[:200])
    each, fixed = np.polyfit(rows[200:].astype(np.float64), seconds[200:], 1)
    assert later.line() == pytest.approx((fixed, each), rel=1e-6)


def test_neither_part_is_below_0_and_of_steps_that_are_alike_no_slope_is_made_up() -> None:
    assert Pace().line() == (0.0, 0.0)
    assert of_steps(np.full(999, 7), np.linspace(0.1, 0.2, 999)).line() == pytest.approx((0.15, 0.0))
    assert of_steps(np.array([1, 2, 3]), np.array([3.0, 2.0, 1.0])).line() == pytest.approx((2.0, 0.0))
    assert of_steps(np.array([1, 2, 9]), np.array([0.1, 0.1, 9.0])).line() == pytest.approx((0.0, 9.2 / 12))


def test_runs_that_were_slowed_tell_together_how_long_steps_take_without() -> None:
    random = np.random.default_rng(1)
    runs = []
    for factor in (1.0, 1.5):
        rows = random.integers(1, 100, 400)
        runs.append((factor, of_steps(rows, factor * (0.002 + 8e-5 * rows))))
    told = sum((pace.slowed(factor) for factor, pace in runs), Pace())
    assert told.line() == pytest.approx((0.002, 8e-5), rel=1e-6)
    explained = {
        each: sum((pace.slowed(1 + each * (f > 1)) for f, pace in runs), Pace()).explained() for each in (0.0, 0.5, 1.0)
    }
    assert max(explained, key=lambda each: explained[each]) == 0.5


def test_what_a_line_explains_is_what_it_takes_off_the_squares() -> None:
    random = np.random.default_rng(2)
    rows = random.integers(1, 50, 200)
    seconds = 0.01 + 1e-3 * rows + 0.01 * random.random(200)
    pace = of_steps(rows, seconds)
    fixed, each = pace.line()
    left = ((seconds - fixed - each * rows) ** 2).sum()
    assert pace.explained() == pytest.approx((seconds**2).sum() - left, rel=1e-9)


def test_it_is_read_back_by_the_names_that_it_is_told_under() -> None:
    pace = of_steps(np.array([1, 2]), np.array([0.5, 0.25]))
    assert Pace.of(pace.named("decode"), "decode") == pace == Pace(2, 3, 5, 0.75, 1.0)
    assert set(pace.named("decode")) < set(PACES) and len(PACES) == 10
