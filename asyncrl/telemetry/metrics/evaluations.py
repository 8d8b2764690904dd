"""Reads evaluations from rows of metrics.jsonl: the results, and the number of rows that have a score.

An evaluation has its own row, at the step whose weights it measured first, written when its result arrived.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.telemetry.metrics.registry import OF_EVERY_ROW

Row = Mapping[str, Any]

METRICS = ("accuracy", "reward", "token_accuracy")
"""Possible names of the mean over the rows of a set; see `reward.metric`. The last is from `asyncrl sft`."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of one set."""

    metric: str
    mean: float | None
    """Mean over the rows that have a score; None if no row has one."""
    count: int
    """Number of rows that have a score."""
    failed: int
    """Number of rows that have none."""
    loss: float | None = None
    """Loss; None if it is not measured."""
    interval: tuple[float, float] | None = None
    """Interval of the mean, with `evaluation.intervals.CONFIDENCE`; None if the row does not have it."""
    loss_interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        said = [] if self.mean is None else [f"{self.metric} {self.mean:.3f}{_within(self.interval, 3)}"]
        said += [] if self.loss is None else [f"loss {self.loss:.4f}{_within(self.loss_interval, 4)}"]
        if self.failed:
            said.append(f"({self.failed} of {self.count + self.failed} rows failed: see logs/rollout-*.log)")
        return " ".join(said)


def _within(interval: tuple[float, float] | None, digits: int) -> str:
    return "" if interval is None else f" [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def evaluations(row: Row) -> dict[str, Evaluation]:
    """Return set -> its evaluation in this row."""
    sets = {name.split("/")[1] for name in row if name.startswith("eval/")}
    return {name: evaluation for name in sorted(sets) if (evaluation := _evaluation(row, f"eval/{name}")) is not None}


def _evaluation(row: Row, place: str) -> Evaluation | None:
    known = {metric: row.get(f"{place}/{metric}") for metric in METRICS}
    metric = next((name for name, mean in known.items() if mean is not None), "")
    count, failed = (_count(row.get(f"{place}/{name}")) for name in ("count", "failed"))
    if not (metric or count or failed):
        return None
    mean, loss = known.get(metric), row.get(f"{place}/loss")
    intervals = (_interval(row, f"{place}/{name}") for name in (metric, "loss"))
    return Evaluation(metric, mean, count, failed, loss, *intervals)


def _count(value: float | None) -> int:
    return int(value) if value and math.isfinite(value) else 0


def _interval(row: Row, name: str) -> tuple[float, float] | None:
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return None if low is None or high is None else (low, high)


def is_evaluation(row: Row) -> bool:
    """Return whether a row belongs to an evaluation, and not to a trained step."""
    return any(name.startswith("eval/") for name in row) and all(
        name in OF_EVERY_ROW or name.startswith("eval/") for name in row
    )


def by_step(rows: Iterable[Row]) -> list[Row]:
    """Return one row per step, in order: the step's own row, with the newest evaluation of its weights on each set."""
    steps: dict[int, Row] = {}
    for row in rows:
        known = steps.get(row["step"])
        if known is None:
            steps[row["step"]] = row
            continue
        own = {name: value for name, value in row.items() if name.startswith("eval/")} if is_evaluation(row) else row
        # A figure that a newer evaluation of the set does not have (all rows failed) is none of the older one's.
        sets = tuple(f"eval/{name}/" for name in evaluations(row))
        kept = {name: value for name, value in known.items() if not name.startswith(sets)}
        steps[row["step"]] = {**row, **kept, **own}
    return [steps[step] for step in sorted(steps)]


@dataclass(slots=True)
class EvaluationHistory:
    """The evaluations of one set so far, for one line of text."""

    last: Evaluation | None = None
    at: int = -1
    """Step of the last evaluation."""
    first: float | None = None
    best: float = float("-inf")

    def add(self, evaluation: Evaluation, step: int) -> None:
        if evaluation.mean is not None:
            self.first = evaluation.mean if self.first is None else self.first
            self.best = max(self.best, evaluation.mean)
        if step >= self.at:
            self.last, self.at = evaluation, step

    def __str__(self) -> str:
        course = "" if self.first is None else f", best {self.best:.3f}, began at {self.first:.3f}"
        return f"{self.last} at step {self.at}{course}"
