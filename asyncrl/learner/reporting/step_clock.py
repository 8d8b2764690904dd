"""Where the seconds of a step went."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.spans import lap

SPANS = {"wait_batch": "wait for a batch", "early": "train before the batch is full", "log": "write the row"}
"""What laps are called in a trace, where they are not called alike."""


@dataclass(slots=True)
class StepClock:
    """Where the seconds went: the laps of a step are all of it, and the steps all of the time. The row of a step and
    its checkpoint count for the step that comes after it."""

    now: Callable[[], float] = time.perf_counter
    laps: dict[str, float] = field(default_factory=dict)
    started: float = 0.0
    mark: float = 0.0

    def start(self) -> None:
        self.laps = {}
        self.started = self.mark = self.now()
        lap("start")

    def lap(self, name: str) -> None:
        """Everything since the last lap was `name`; what is of one name is added up."""
        now = self.now()
        self.laps[name] = self.laps.get(name, 0.0) + now - self.mark
        self.mark = now
        lap(SPANS.get(name, name))

    def next(self) -> dict[str, float]:
        """`time/*` in seconds, of the step that ended with the last lap; the next one began then."""
        row = {f"time/{name}": seconds for name, seconds in self.laps.items()} | {"time/step": self.mark - self.started}
        self.laps, self.started = {}, self.mark
        return row
