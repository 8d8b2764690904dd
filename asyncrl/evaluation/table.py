"""Turns the scores of all rows into a table: a line per `data_source` and one over all rows, with intervals.

Rows are the sampling unit of the intervals, because samples of one row are not independent measurements of the model
(see `asyncrl.evaluation.intervals`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.evaluation.estimators import best_at_k, majority_at_k, pass_at_k
from asyncrl.evaluation.intervals import SHARE, Range, interval, range_of

ALL = "all"
"""Name of the line over all rows."""
OF_SOURCE = "/mean"
"""End of the name of the mean of one `data_source`, during training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """The scored samples of one row."""

    row: int
    data_source: str = ""
    """Empty if the row names none."""
    scores: tuple[float, ...]
    answers: tuple[str | None, ...] = ()
    """Answers of the same samples; empty if no votes are counted."""
    failed: int = 0
    """Samples of this row without a score, whatever failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    value: float
    low: float | None
    """Lower end of the interval. `low` and `high` are None if the rows are too few to determine it."""
    high: float | None
    rows: int
    """Rows with enough samples, from which it was estimated."""

    def with_ends(self) -> tuple[tuple[str, float], ...]:
        """`(suffix of the metric's name, value)` for the value and, if known, the ends of its interval."""
        known = (("", self.value), ("_low", self.low), ("_high", self.high))
        return tuple((end, value) for end, value in known if value is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLine:
    name: str
    """The `data_source`, or `ALL`."""
    rows: int
    samples: int
    """Samples with a score."""
    failed: int
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    """By metric: `avg@8`, `pass@1`, `maj@8`... Metrics for which no row has enough samples are left out."""


def ks_of(samples: int) -> tuple[int, ...]:
    """The values of k to report: 1, 2, 4... and `samples` itself."""
    powers = [1 << place for place in range(samples.bit_length())]
    return tuple(sorted({k for k in powers if k <= samples} | {samples}))


def figures_for(samples: int, *, votes: bool) -> list[str]:
    """Names of the metrics, besides the mean score, for rows with this many samples; none for one sample."""
    names = ("pass", "best", *(("maj",) if votes else ()))
    return [f"avg@{samples}", *(f"{name}@{k}" for k in ks_of(samples) for name in names)] if samples > 1 else []


def tabulate(
    rows: Iterable[RowScores], *, samples: int, pass_score: float = 1.0, seed: int = 0
) -> tuple[TableLine, ...]:
    """A line per `data_source`, sorted by name, then the line over all rows.

    Args:
        samples: samples drawn per row. Rows with fewer scores are left out of estimates that need more.
        pass_score: a sample passes if its score is at least this.
        seed: for drawing majority votes.
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
    """Metrics of one row for which it has enough samples; `maj@k` only if its answers are given."""
    found = {f"avg@{samples}": math.fsum(row.scores) / len(row.scores)} if row.scores else {}
    passed = sum(score >= pass_score for score in row.scores)
    for k in ks_of(samples):
        if len(row.scores) >= k:
            found |= {f"pass@{k}": pass_at_k(len(row.scores), passed, k), f"best@{k}": best_at_k(row.scores, k)}
            if row.answers:
                found[f"maj@{k}"] = majority_at_k(row.answers, row.scores, k, seed + row.row)
    return found


def _per_row(rows: Sequence[RowScores], samples: int, pass_score: float, seed: int) -> dict[str, NDArray[np.float64]]:
    """Metric -> [rows], NaN for rows with too few samples."""
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
        estimates=means(taken, np.array([score for row in own for score in row.scores], np.float64)),
    )


def means(values: Mapping[str, NDArray[np.float64]], scores: NDArray[np.float64] | None = None) -> dict[str, Estimate]:
    """Mean of each metric over the rows that have it.

    Args:
        values: metric -> [R], NaN for rows without a value. A metric that no row has is left out.
        scores: those from which the metrics were made, or as many as are known; NaN counts for nothing. They say the
            range of every metric but `pass@k`: rows of 3, 0, 0, 0 have means below 1, and may have one above it. None:
            the values of each metric say its own.
    """
    known = {name: column[~np.isnan(column)] for name, column in values.items()}
    known = {name: column for name, column in known.items() if len(column)}
    return {
        name: _estimate(column, np.ones_like(column), _range(name, column if scores is None else scores))
        for name, column in known.items()
    }


def _range(name: str, scores: NDArray[np.float64]) -> Range | None:
    return SHARE if name.startswith("pass@") else range_of(scores[~np.isnan(scores)])


def ratios(
    parts: Mapping[str, NDArray[np.float64]], sizes: NDArray[np.float64], within: Mapping[str, Range]
) -> dict[str, Estimate]:
    """sum(parts) / sum(sizes) for each of `parts` [R], with sizes [R] above 0: means over tokens, with rows as the
    sampling unit. `within`: the range per token, for those that have one."""
    return {name: _estimate(column, sizes, within.get(name)) for name, column in parts.items()}


def _estimate(parts: NDArray[np.float64], sizes: NDArray[np.float64], within: Range | None) -> Estimate:
    low, high = interval(parts, sizes, within) or (None, None)
    return Estimate(value=float(parts.sum() / sizes.sum()), low=low, high=high, rows=len(parts))
