"""Evaluations beside the training: what a worker is asked to score, what it answers, and what the learner is told."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.evaluation.samples import Sample
from asyncrl.types import NO_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalAssignment:
    """An order to score rows `[start, stop)` of an evaluation set, on what the engine serves meanwhile."""

    job_id: int
    chunk: int
    attempt: int
    eval_set: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Scores of one evaluation assignment."""

    job_id: int
    chunk: int
    attempt: int
    version_min: int
    """The oldest version that sampled a token of a scored row; NO_VERSION when none was scored."""
    version_max: int
    """The newest one, likewise."""
    scores: tuple[float, ...]
    """Of each row that has one: the mean over its samples."""
    failed: int = 0
    """Rows without a score, whatever failed; they are in no mean."""
    missing: int = 0
    """Rows past the end of the file: they do not exist."""
    figures: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Other figures (`pass@8`) of the rows of `scores`; None where one has too few samples."""
    samples: tuple[Sample, ...] = ()
    """Of some rows, at most one of each, to be read; see `evaluation.samples.for_the_wire`."""

    @classmethod
    def all_failed(cls, given: EvalAssignment) -> EvalResult:
        """Of an order that nobody finished."""
        return cls(
            job_id=given.job_id,
            chunk=given.chunk,
            attempt=given.attempt,
            version_min=NO_VERSION,
            version_max=NO_VERSION,
            scores=(),
            failed=given.stop - given.start,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSummary:
    """A finished evaluation job, handed to the learner for the metrics."""

    job_id: int
    step: int
    """Trained steps when it was asked for, with the weights of `policy_version`."""
    policy_version: int
    eval_set: str
    mean: float
    """Of the scores of the rows that have one."""
    low: float | None
    """From here to `high` the mean lies with `evaluation.intervals.CONFIDENCE`; None where these rows do not say."""
    high: float | None
    count: int
    """Rows that have a score."""
    failed: int
    """Rows that have none."""
    version_min: int
    """The oldest version that was measured: at least `policy_version`."""
    version_max: int
    superseded: int
    """Jobs of this set that were cancelled since the last summary, each for a newer one."""
    figures: dict[str, float] = field(default_factory=dict)
    """Other means over rows, by name; `<name>_low` and `<name>_high` are what `low` and `high` are to `mean`."""
    samples: tuple[Sample, ...] = ()
    """At most `MOST_SAMPLES`, by row."""
