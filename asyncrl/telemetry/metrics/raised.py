"""Reports of alarms, as written to `alarms.jsonl`: that one has begun to hold, and that it is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

Row = Mapping[str, Any]

ALARMS_FILE = "alarms.jsonl"
PASSING = ("clock", "no_workers")
"""Alarms that are no reason to stop a run: training needs no clock; dead workers are restarted, and a pool that gives
up ends the run itself."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An alarm that has begun to hold, or is over."""

    name: str
    step: int
    said: str
    advice: str = ""
    over: int | None = None
    """Number of steps for which it held; None if it has begun."""

    @classmethod
    def of(cls, row: Row) -> Raised | None:
        """Read a row of `alarms.jsonl`; None if it is damaged."""
        known = {each.name: row[each.name] for each in fields(cls) if each.name in row}
        whole = isinstance(row.get("name"), str) and isinstance(row.get("step"), int) and "said" in row
        return cls(**known) if whole else None

    def as_row(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in ("", None)}

    @property
    def stops(self) -> bool:
        """Whether this report may stop a run."""
        return self.over is None and self.name not in PASSING

    def __str__(self) -> str:
        return f"alarm {self.name} at step {self.step}: {self.said}.{self.advice and f' {self.advice}'}"


def ended_by_resume(told: Sequence[Row], step: int) -> list[Raised]:
    """Return the ends of the alarms that held before a resume: the learner restarts after `step`, without the rows that
    raised them."""
    begun: dict[str, Raised] = {}
    for raised in filter(None, map(Raised.of, told)):
        begun.pop(raised.name, None)
        begun |= {raised.name: raised} if raised.over is None else {}
    steps = {each.name: step - each.step + 1 for each in begun.values()}
    said = "over after {} steps: the run was resumed. If it still holds, it is reported again"
    return [Raised(name, step, said.format(held), over=held) for name, held in steps.items()]
