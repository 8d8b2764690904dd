from __future__ import annotations

import math

import numpy as np
import pytest

from asyncrl.evaluation.intervals import SHARE, T, Z, interval, range_of, student


def of(values: list[float]) -> tuple[float, float] | None:
    column = np.array(values)
    return interval(column, np.ones_like(column), range_of(column))


def coverage(rows: int, chance: float) -> float:
    """How often the interval of so many right or wrong answers has the true chance: the exact sum over all counts."""
    found = [of([1.0] * right + [0.0] * (rows - right)) for right in range(rows + 1)]
    ways = [math.comb(rows, right) * chance**right * (1 - chance) ** (rows - right) for right in range(rows + 1)]
    return sum(way for way, ends in zip(ways, found, strict=True) if ends and ends[0] <= chance <= ends[1])


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 16, 30, 100])
def test_an_interval_has_the_truth_about_as_often_as_it_says_with_few_rows_too(rows: int) -> None:
    found = [coverage(rows, chance) for chance in np.linspace(0.01, 0.99, 99)]
    assert 0.95 <= np.mean(found) <= 0.98 and min(found) > 0.8


def test_of_right_and_wrong_answers_it_is_that_of_agresti_and_coull() -> None:
    for right, rows in ((1, 1), (0, 8), (5, 8), (90, 100)):
        share = (right + 2) / (rows + 4)
        half = Z * math.sqrt(share * (1 - share) / (rows + 4))
        assert of([1.0] * right + [0.0] * (rows - right)) == pytest.approx((max(0, share - half), min(1, share + half)))


def test_rows_that_agree_are_not_called_exactly_known_and_the_value_lies_within() -> None:
    for values in ([0.5] * 8, [1.0] * 1000, [-1.0] * 20, [-1.0, 1.0], [0.0]):
        ends = of(values)
        assert ends is not None and ends[0] < ends[1] and ends[0] <= np.mean(values) <= ends[1]


def test_scores_of_any_size_have_students_interval_and_none_where_rows_do_not_say() -> None:
    assert of([7.0]) is None and of([7.0] * 9) is None
    low, high = of([2.0, 4.0, 9.0]) or (0.0, 0.0)
    half = 4.30265 * np.std([2.0, 4.0, 9.0], ddof=1) / math.sqrt(3)
    assert (low, high) == pytest.approx((5 - half, 5 + half))


def test_a_range_is_read_off_the_scores() -> None:
    assert [range_of(np.array(each)) for each in ([0.2, 1.0], [-0.5, 0.5], [0.5, 2.0], [-3.0])] == [
        SHARE, (-1.0, 1.0), None, None,
    ]  # fmt: skip


def test_students_points_against_its_density() -> None:
    for freedom in (1, 4, len(T), len(T) + 1, 20, 200):
        t = np.linspace(-student(freedom), student(freedom), 400_001)
        log_c = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
        density = np.exp(log_c - (freedom + 1) / 2 * np.log1p(t**2 / freedom))
        assert density.mean() * 2 * student(freedom) == pytest.approx(0.95, abs=5e-5)
