"""How long steps take, by how much is in them: sums that add up over time, engines and runs, and give a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields

KINDS = ("decode", "prefill")
"""Steps of an engine: a decode step has sequences, a prefill has prompts."""


@dataclass(slots=True)
class Pace:
    """Sums over steps of one kind. One thread adds, any may read."""

    steps: float = 0.0
    rows: float = 0.0
    """What was in them, added up."""
    rows_squared: float = 0.0
    s: float = 0.0
    """Seconds."""
    rows_s: float = 0.0
    """Rows times seconds of each step, added up."""

    def add(self, rows: int, seconds: float) -> None:
        self.steps += 1
        self.rows += rows
        self.rows_squared += rows * rows
        self.s += seconds
        self.rows_s += rows * seconds

    def named(self, kind: str) -> dict[str, float]:
        return {f"{kind}_{each.name}": getattr(self, each.name) for each in fields(self)}

    @classmethod
    def of(cls, values: Mapping[str, float], prefix: str) -> Pace:
        """`prefix` stands before the names; what is missing is 0."""
        return cls(*(values.get(f"{prefix}_{each.name}", 0.0) for each in fields(cls)))

    def __add__(self, other: Pace) -> Pace:
        return Pace(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Pace) -> Pace:
        return Pace(*(mine - its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def line(self) -> tuple[float, float]:
        """(fixed, each) of `seconds = fixed + each * rows`: least squares over the steps, neither below 0."""
        if not self.steps:
            return 0.0, 0.0
        rows, seconds = self.rows / self.steps, self.s / self.steps
        variance = self.rows_squared / self.steps - rows * rows
        # Of steps that are all alike no slope is known; what rounding leaves of the variance would make one up.
        slope = (self.rows_s / self.steps - rows * seconds) / variance if variance > 1e-4 * rows * rows else 0.0
        slope = min(max(slope, 0.0), seconds / max(rows, 1.0))
        return seconds - slope * rows, slope


APART = 1.5
"""Times as many rows as in the steps of another run: from there on the two tell a slope."""


def line_of_runs(paces: Sequence[Pace]) -> tuple[float, float]:
    """(fixed, each) as `Pace.line`, of several runs.

    Where their steps differ in rows it is the line through the means of the runs, each counting as much. Within a run
    the seconds of a step follow its rows badly: who shares the processor works most when sequences have ended, which
    is when the batch is small, and the slope over the steps comes out too flat, or as 0.
    """
    means = Pace()
    for pace in paces:
        if pace.steps:
            rows, seconds = pace.rows / pace.steps, pace.s / pace.steps
            means += Pace(1.0, rows, rows * rows, seconds, rows * seconds)
    rows = [pace.rows / pace.steps for pace in paces if pace.steps]
    return means.line() if rows and max(rows) >= APART * min(rows) else sum(paces, Pace()).line()


PACES = tuple(name for kind in KINDS for name in Pace().named(kind))
"""Names of an engine's statistics."""
