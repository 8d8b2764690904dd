"""From the scores of all rows to a table: one line per `data_source` and one over all, each figure with an interval.

The interval is one over rows with all their samples, since samples of one row are no independent measurements of the
model: see `asyncrl.evaluation.intervals`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.evaluation.estimators import best_at_k, majority_at_k, pass_at_k
from asyncrl.evaluation.intervals import Range, interval, range_of

ALL = "all"
"""Name of the line over every row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """The samples of one row that have a score."""

    row: int
    data_source: str = ""
    """Empty: the row names none."""
    scores: tuple[float, ...]
    answers: tuple[str | None, ...] = ()
    """Of the same samples; empty where no vote is to be counted."""
    failed: int = 0
    """Samples of this row that have none, whatever failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    value: float
    low: float | None
    """None, as `high`: so few rows do not say."""
    high: float | None
    rows: int
    """Rows it is known from: those with enough samples."""

    def with_ends(self) -> tuple[tuple[str, float], ...]:
        """The value and the ends of its interval, where it has one, each with what a metric's name ends with."""
        known = (("", self.value), ("_low", self.low), ("_high", self.high))
        return tuple((end, value) for end, value in known if value is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLine:
    name: str
    """The `data_source`, or `ALL`."""
    rows: int
    samples: int
    """That have a score."""
    failed: int
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    """By metric: `avg@8`, `pass@1`, `maj@8`...; one that no row has enough samples for is left out."""


def ks_of(samples: int) -> tuple[int, ...]:
    """1, 2, 4 ... and `samples` itself: at which k to report."""
    powers = [1 << place for place in range(samples.bit_length())]
    return tuple(sorted({k for k in powers if k <= samples} | {samples}))


def figures_for(samples: int, *, votes: bool) -> list[str]:
    """Names of what is known of rows with so many samples each, beside the mean score; none with one sample."""
    names = ("pass", "best", *(("maj",) if votes else ()))
    return [f"avg@{samples}", *(f"{name}@{k}" for k in ks_of(samples) for name in names)] if samples > 1 else []


def tabulate(
    rows: Iterable[RowScores], *, samples: int, pass_score: float = 1.0, seed: int = 0
) -> tuple[TableLine, ...]:
    """A line per `data_source`, by name, and that over all rows last.

    Args:
        samples: drawn per row; rows with fewer scores are in no estimate that needs more than they have.
        pass_score: a sample passes with at least this score.
        seed: of the votes.
    """
    known = sorted(rows, key=lambda row: row.row)
    values = _per_row(known, samples, pass_score, seed)
    places: dict[str, list[int]] = {}
    for place, row in enumerate(known):
        places.setdefault(row.data_source, []).append(place)
    named = sorted(name for name in places if name)
    lines = [_line(name, known, places[name], values) for name in named if len(places) > 1]
    return (*lines, _line(ALL, known, range(len(known)), values))


def figures_of(row: RowScores, *, samples: int, pass_score: float = 1.0, seed: int = 0) -> dict[str, float]:
    """Of one row: the figures that it has enough samples for; `maj@k` where its answers are given."""
    found = {f"avg@{samples}": math.fsum(row.scores) / len(row.scores)} if row.scores else {}
    passed = sum(score >= pass_score for score in row.scores)
    for k in ks_of(samples):
        if len(row.scores) >= k:
            found |= {f"pass@{k}": pass_at_k(len(row.scores), passed, k), f"best@{k}": best_at_k(row.scores, k)}
            if row.answers:
                found[f"maj@{k}"] = majority_at_k(row.answers, row.scores, k, seed + row.row)
    return found


def _per_row(rows: Sequence[RowScores], samples: int, pass_score: float, seed: int) -> dict[str, NDArray[np.float64]]:
    """Metric -> [rows], NaN where a row has too few samples."""
    votes = any(answer is not None for row in rows for answer in row.answers)
    figures = [figures_of(row, samples=samples, pass_score=pass_score, seed=seed) for row in rows]
    names = dict.fromkeys(name for row in figures for name in row if votes or not name.startswith("maj@"))
    return {name: np.array([row.get(name, math.nan) for row in figures], np.float64) for name in names}


def _line(
    name: str, rows: Sequence[RowScores], places: Sequence[int], values: Mapping[str, NDArray[np.float64]]
) -> TableLine:
    own = [rows[place] for place in places]
    taken = {metric: column[list(places)] for metric, column in values.items()}
    return TableLine(
        name=name,
        rows=len(own),
        samples=sum(len(row.scores) for row in own),
        failed=sum(row.failed for row in own),
        estimates=means(taken),
    )


def means(values: Mapping[str, NDArray[np.float64]]) -> dict[str, Estimate]:
    """Mean of each metric over the rows that have it.

    Args:
        values: metric -> [R], NaN where a row has no value. A metric that no row has is left out.
    """
    known = {name: column[~np.isnan(column)] for name, column in values.items()}
    return {
        name: _estimate(column, np.ones_like(column), range_of(column)) for name, column in known.items() if len(column)
    }


def ratios(
    parts: Mapping[str, NDArray[np.float64]], sizes: NDArray[np.float64], within: Mapping[str, Range]
) -> dict[str, Estimate]:
    """Sum of each of `parts` [R] over the sum of `sizes` [R], all above 0: a mean over tokens, of rows that are drawn
    whole. `within`: what those may be that have a range, per token."""
    return {name: _estimate(column, sizes, within.get(name)) for name, column in parts.items()}


def _estimate(parts: NDArray[np.float64], sizes: NDArray[np.float64], within: Range | None) -> Estimate:
    low, high = interval(parts, sizes, within) or (None, None)
    return Estimate(value=float(parts.sum() / sizes.sum()), low=low, high=high, rows=len(parts))
