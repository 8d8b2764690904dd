"""Measures the seconds of the parts of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.spans import lap

SPANS = {"wait_batch": "wait for a batch", "log": "write the row"}
"""Names of laps in a trace, if they differ."""


@dataclass(slots=True)
class StepClock:
    """Splits time into laps: the laps of a step add up to all of it, and the steps to the whole time. Writing the row
    of a step, and its checkpoint, count towards the next step."""

    now: Callable[[], float] = time.perf_counter
    laps: dict[str, float] = field(default_factory=dict)
    started: float = 0.0
    mark: float = 0.0

    def start(self) -> None:
        self.laps = {}
        self.started = self.mark = self.now()
        lap("start")

    def lap(self, name: str) -> None:
        """Count everything since the last lap as `name`; laps of the same name are summed."""
        now = self.now()
        self.laps[name] = self.laps.get(name, 0.0) + now - self.mark
        self.mark = now
        lap(SPANS.get(name, name))

    def next(self) -> dict[str, float]:
        """`time/*` in seconds of the step that ended with the last lap, which starts the next step."""
        row = {f"time/{name}": seconds for name, seconds in self.laps.items()} | {"time/step": self.mark - self.started}
        self.laps, self.started = {}, self.mark
        return row
