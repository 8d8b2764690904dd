"""Data types of evaluations during training: what a worker is asked to score, its answer, and the learner's summary."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.evaluation.samples import Sample
from asyncrl.types import NO_VERSION


@dataclass(frozen=True, slots=True)
class EvalJob:
    """What the learner asks for: rows `[0, rows)` of a set, in chunks, at `policy_version` or newer."""

    job_id: int
    step: int
    """Trained steps at the time of the request."""
    policy_version: int
    eval_set: str
    rows: int
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalAssignment:
    """An order to score rows `[start, stop)` of an evaluation set with the weights that the engine serves meanwhile."""

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
    """The oldest version that sampled a token of a scored row; NO_VERSION if no row was scored."""
    version_max: int
    """The newest such version."""
    scores: tuple[float, ...]
    """The mean over its samples, of each row that has a score."""
    failed: int = 0
    """Rows without a score, whatever failed. They are in no mean."""
    missing: int = 0
    """Rows past the end of the file."""
    figures: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Other metrics (`pass@8`) of the rows of `scores`; None for a row with too few samples."""
    samples: tuple[Sample, ...] = ()
    """At most one sample per row, of some rows, for people to read; see `evaluation.samples.for_the_wire`."""

    @classmethod
    def all_failed(cls, given: EvalAssignment) -> EvalResult:
        """The result of an order that no worker finished."""
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
    """The result of a finished evaluation job, for the learner's metrics."""

    job_id: int
    step: int
    """Trained steps at the time of the request. The weights were those of `policy_version`."""
    policy_version: int
    eval_set: str
    mean: float
    """Mean score of the rows that have one."""
    low: float | None
    """Lower end of the confidence interval (`evaluation.intervals.CONFIDENCE`); None if the rows determine none."""
    high: float | None
    count: int
    """Rows with a score."""
    failed: int
    """Rows without a score."""
    version_min: int
    """The oldest version that was measured; at least `policy_version`."""
    version_max: int
    superseded: int
    """Jobs of this set that were cancelled in favour of a newer one since the last summary."""
    figures: dict[str, float] = field(default_factory=dict)
    """Other means over rows, by name, each with the ends of its interval as `<name>_low` and `<name>_high`."""
    samples: tuple[Sample, ...] = ()
    """At most `MOST_SAMPLES`, in the order of their rows."""
