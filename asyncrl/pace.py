"""Duration of an engine's steps as a function of batch size: sums that can be added over time, engines and runs, and a
line fitted through them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields

KINDS = ("decode", "prefill")
"""Kinds of engine steps. The rows of a decode step are sequences, those of a prefill are prompts."""


@dataclass(slots=True)
class Pace:
    """Sums over steps of one kind. One thread adds; any thread may read."""

    steps: float = 0.0
    rows: float = 0.0
    """Sum of the rows of each step."""
    rows_squared: float = 0.0
    s: float = 0.0
    """Sum of the seconds of each step."""
    rows_s: float = 0.0
    """Sum of rows times seconds of each step."""

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
        """Read the sums named `<prefix>_<field>`; missing ones are 0."""
        return cls(*(values.get(f"{prefix}_{each.name}", 0.0) for each in fields(cls)))

    def __add__(self, other: Pace) -> Pace:
        return Pace(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Pace) -> Pace:
        return Pace(*(mine - its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def slowed(self, factor: float) -> Pace:
        """These sums, for the line that the steps would have if each took `factor` times as long as it says. Added up
        over runs that were slowed by different factors, they give the line of least squares without the slowing."""
        square = factor * factor
        sums = self.steps * square, self.rows * square, self.rows_squared * square
        return Pace(*sums, self.s * factor, self.rows_s * factor)

    def line(self) -> tuple[float, float]:
        """(fixed, each) of `seconds = fixed + each * rows`: least squares over the steps, both at least 0."""
        if not self.steps:
            return 0.0, 0.0
        rows, seconds = self.rows / self.steps, self.s / self.steps
        variance = self.rows_squared / self.steps - rows * rows
        # Steps that all have the same size give no slope: without this, rounding errors of the variance would.
        slope = (self.rows_s / self.steps - rows * seconds) / variance if variance > 1e-4 * rows * rows else 0.0
        slope = min(max(slope, 0.0), seconds / max(rows, 1.0))
        return seconds - slope * rows, slope

    def explained(self) -> float:
        """What `line` takes off the sum of the squares of the steps' seconds."""
        fixed, each = self.line()
        sizes = fixed * fixed * self.steps + 2 * fixed * each * self.rows + each * each * self.rows_squared
        return 2 * (fixed * self.s + each * self.rows_s) - sizes


PACES = tuple(name for kind in KINDS for name in Pace().named(kind))
"""Names of the engine statistics that hold these sums."""
