"""`Metric`: the unit and meaning of one metric, and which direction is better; and how tables of them are read."""

from __future__ import annotations

import re
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


def metrics(table: str) -> tuple[Metric, ...]:
    """Read a table with a line per metric: `name | unit | kind | meaning`. The kind is `higher` or `lower` if that is
    better, `total`, both, or `-`. An indented line continues the one before it."""
    rows = [line.split(" | ", 3) for line in re.sub(r"\n +", " ", table.strip()).split("\n")]
    return tuple(
        Metric(name, unit, meaning, kind.removesuffix("total").strip(", -"), kind.endswith("total"))
        for name, unit, kind, meaning in rows
    )
