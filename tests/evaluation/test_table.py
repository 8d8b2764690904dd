from __future__ import annotations

import math
import random

import numpy as np
import pytest

from asyncrl.evaluation.intervals import SHARE, Z
from asyncrl.evaluation.table import ALL, RowScores, ks_of, means, ratios, tabulate


def rows(count: int, samples: int = 4, chance: float = 0.5, source: str = "", start: int = 0) -> list[RowScores]:
    generator = random.Random(count)
    return [
        RowScores(
            row=start + n, data_source=source, scores=tuple(float(generator.random() < chance) for _ in range(samples))
        )
        for n in range(count)
    ]


def test_figures_are_told_at_every_power_of_two_and_at_all_samples():
    assert ks_of(1) == (1,) and ks_of(6) == (1, 2, 4, 6) and ks_of(8) == (1, 2, 4, 8)


def test_a_table_has_a_line_per_data_source_and_one_over_all_that_is_not_the_mean_of_means():
    table = tabulate([*rows(3, source="math", start=10), *rows(9, chance=0.9, source="gsm8k")], samples=4)
    assert [(line.name, line.rows) for line in table] == [("gsm8k", 9), ("math", 3), (ALL, 12)]
    one, two, both = (line.estimates["avg@4"].value for line in table)
    assert both == pytest.approx((9 * one + 3 * two) / 12)


def test_rows_of_one_data_source_or_of_none_make_one_line():
    assert [line.name for line in tabulate(rows(4, source="gsm8k"), samples=4)] == [ALL]
    assert [line.name for line in tabulate(rows(4), samples=4)] == [ALL]


def test_rows_with_too_few_scores_are_in_no_figure_that_needs_more():
    given = [RowScores(row=0, scores=(1.0,), failed=1), RowScores(row=1, scores=(0.0, 0.0))]
    (line,) = tabulate([*given, RowScores(row=2, scores=(), failed=2)], samples=2)
    assert (line.rows, line.samples, line.failed) == (3, 3, 3)
    assert line.estimates["pass@1"].rows == 2 and line.estimates["pass@1"].value == 0.5
    assert line.estimates["pass@2"].rows == 1 and line.estimates["pass@2"].value == 0.0
    assert line.estimates["avg@2"].value == 0.5


def test_nothing_that_was_scored_gives_no_figure():
    (line,) = tabulate([RowScores(row=0, scores=(), failed=1)], samples=1)
    assert line.estimates == {} and line.failed == 1
    assert tabulate([], samples=1)[0].rows == 0


def test_votes_are_told_only_where_answers_are_known():
    scores = {"row": 0, "scores": (1.0, 1.0, 0.0)}
    assert "maj@3" not in tabulate([RowScores(**scores, answers=(None,) * 3)], samples=3)[0].estimates
    (line,) = tabulate([RowScores(**scores, answers=("7", "7", "8"))], samples=3)
    assert line.estimates["maj@3"].value == 1.0 and line.estimates["maj@1"].value == pytest.approx(2 / 3)


def test_a_sample_passes_from_the_given_score_on():
    (line,) = tabulate([RowScores(row=0, scores=(0.5, 0.8))], samples=2, pass_score=0.8)
    assert line.estimates["pass@1"].value == 0.5 and line.estimates["best@2"].value == 0.8


def test_the_order_in_which_rows_came_changes_nothing():
    given = rows(40, source="a") + rows(20, source="b", start=40)
    mixed = random.Random(0).sample(given, len(given))
    assert tabulate(mixed, samples=4, seed=3) == tabulate(given, samples=4, seed=3)


def test_the_scores_say_the_range_and_not_their_means_over_rows():
    """Means of rows of 3 or 0 may lie between 0 and 1, and the best of rows of 1 or -1 is never below 0."""
    rare = [RowScores(row=row, scores=(3.0, 0.0, 0.0, 0.0) if row % 2 else (0.0,) * 4) for row in range(6)]
    (line,) = tabulate(rare, samples=4)
    average = line.estimates["avg@4"]
    half = 2.57058 * np.std([0.0, 0.75] * 3, ddof=1) / math.sqrt(6)
    assert (average.low, average.high) == pytest.approx((0.375 - half, 0.375 + half))
    assert (line.estimates["best@4"].high or 0) > 1.5
    signs = [RowScores(row=row, scores=(1.0, -1.0)) for row in range(6)]
    (line,) = tabulate(signs, samples=2)
    best, average = line.estimates["best@2"], line.estimates["avg@2"]
    middle, half = 6 / 10, Z * math.sqrt((8 * 0.4**2 + 2 * 1.6**2) / 100)
    assert (best.low, best.high) == pytest.approx((middle - half, 1.0))
    assert (average.low, average.high) == pytest.approx((-Z * 2 / 10, Z * 2 / 10))


def test_the_interval_is_that_of_the_mean_over_rows():
    """Against the normal approximation, which 2,000 rows justify."""
    column = np.array([row.scores[0] for row in rows(2000)])
    found = means({"m": column})["m"]
    half = 1.96 * column.std() / math.sqrt(len(column))
    assert found.value == pytest.approx(column.mean())
    assert found.low is not None and found.high is not None
    assert found.high - found.value == pytest.approx(half, rel=0.15)
    assert found.value - found.low == pytest.approx(half, rel=0.15)


def test_samples_of_one_row_are_no_independent_measurements():
    """Eight times the same score per row must not make the interval narrower than once does."""
    once = means({"m": np.array([row.scores[0] for row in rows(50)])})["m"]
    copied = [RowScores(row=row.row, scores=row.scores[:1] * 8) for row in rows(50)]
    (line,) = tabulate(copied, samples=8)
    found = line.estimates["avg@8"]
    assert (found.low, found.high) == pytest.approx((once.low, once.high))


def test_one_row_is_not_called_exactly_known():
    (line,) = tabulate([RowScores(row=0, scores=(0.25,))], samples=1)
    found = line.estimates["avg@1"]
    assert found.low is not None and found.high is not None
    assert found.low < 0.05 and found.value == 0.25 and found.high > 0.8
    (line,) = tabulate([RowScores(row=0, scores=(25.0,))], samples=1)
    found = line.estimates["avg@1"]
    assert (found.low, found.value, found.high) == (None, 25.0, None), "of one row without a range nothing is known"


def test_of_rows_of_one_size_a_ratio_has_the_interval_of_their_mean_and_a_long_row_counts_by_its_length() -> None:
    values = np.random.default_rng(0).random(30)
    alike = ratios({"m": 7.0 * values}, np.full(30, 7.0), {"m": SHARE})["m"]
    mean = means({"m": values})["m"]
    assert [value for _, value in alike.with_ends()] == pytest.approx(
        [value for _, value in mean.with_ends()], rel=1e-12
    )
    long = ratios({"m": np.array([0.0, 90.0])}, np.array([10.0, 90.0]), {"m": SHARE})["m"]
    assert long.low is not None and long.value == 0.9 and long.low < 0.4 and long.high == 1.0
