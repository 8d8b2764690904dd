"""One metric: its unit, its meaning and which way is better."""

from __future__ import annotations

from dataclasses import dataclass

HIGHER, LOWER, NEITHER = "higher", "lower", ""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    """`1` is a plain number, `share` one from 0 to 1."""
    meaning: str
    better: str = NEITHER
    """Which way a run wants it, other things being equal; empty where neither is better."""
    total: bool = False
    """Whether it is counted up since the process that counts it began, and not of one step."""

    @property
    def room(self) -> str:
        return self.name.partition("/")[0]
