"""`Metric`: the unit and meaning of one metric, and which direction is better."""

from __future__ import annotations

from dataclasses import dataclass

HIGHER, LOWER, NEITHER = "higher", "lower", ""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    """`1` for a plain number, `share` for a number from 0 to 1."""
    meaning: str
    better: str = NEITHER
    """Which direction is better, other things being equal; empty if neither is."""
    total: bool = False
    """Whether it is a total since the start of the process that counts it, not the value of one step."""

    @property
    def room(self) -> str:
        return self.name.partition("/")[0]
