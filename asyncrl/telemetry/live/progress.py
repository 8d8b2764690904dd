"""Shows the progress of a run: one line per step in logs and pipes, a live table on a terminal.

consumes: rows of metrics.jsonl as they are written · waits for: nothing; the supervisor calls `refresh`
"""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.telemetry.live.console import LiveView, facts, say
from asyncrl.telemetry.live.tails import MetricsTail, RewardWarnings, Row
from asyncrl.telemetry.metrics.alarms import STALL, Stall
from asyncrl.telemetry.metrics.evaluations import EvaluationHistory, evaluations, is_evaluation
from asyncrl.telemetry.metrics.log import METRICS_FILE
from asyncrl.telemetry.metrics.printed import clock, failed_rewards, format_line, who_waits
from asyncrl.telemetry.metrics.raised import ALARMS_FILE, Raised

PACE_OF = 50
"""Number of the last steps from which the remaining time is estimated."""
MOST_AGES = 6
"""Limit on the ages shown in a line."""
BY_AGE = re.compile(r".*_age_\d+|staleness/hist_\d+")
"""Metrics that a row lacks if there is nothing of that age; an earlier row's values must not be shown instead."""


class Sparkline:
    """A curve in one line of text: each letter's height is the mean of some consecutive values, relative to the range
    of these means."""

    LETTERS, WIDE, KEPT = "▁▂▃▄▅▆▇█", 40, 2000
    MOST = 1e300
    """Limit on a value's magnitude: sums and differences of larger ones overflow, and users' rewards may be any."""

    def __init__(self) -> None:
        self._values: list[float] = []

    def add(self, value: float) -> None:
        self._values.append(min(self.MOST, max(-self.MOST, value)))
        if len(self._values) >= self.KEPT:  # for a long run, keep every second value
            self._values = self._values[1::2]

    def __str__(self) -> str:
        bounds = [len(self._values) * part // self.WIDE for part in range(self.WIDE + 1)]
        parts = [statistics.fmean(self._values[a:b]) for a, b in itertools.pairwise(bounds) if b > a]
        low, high = min(parts, default=0.0), max(parts, default=0.0)
        most = len(self.LETTERS) - 1
        return "".join(self.LETTERS[round(most * (part - low) / (high - low)) if high > low else 0] for part in parts)


class RunView(LiveView):
    """A live table on a terminal, one line per step elsewhere. Call `refresh` often.

    Args:
        resumed: number of steps trained before this start: existing rows are not shown again. None shows all rows.
        ignored: names of alarms that are not shown.
    """

    def __init__(
        self, run_dir: Path, steps: int, console: Console, resumed: int | None = None, ignored: Sequence[str] = ()
    ) -> None:
        super().__init__(console)
        self._tail = MetricsTail(run_dir / METRICS_FILE)
        self._resumed = resumed or 0
        if resumed is not None:
            self._tail.read()
        self.trained = False
        """Whether a step was trained since this view was created."""
        self._warnings = RewardWarnings(run_dir / "logs")
        self._stall, self._told = Stall(ignored), MetricsTail(run_dir / ALARMS_FILE)
        if resumed is not None:
            self._told.read()
        self.alarmed = False
        """Whether an alarm that may stop a run was shown since this view was created."""
        self._steps = steps
        self._started = time.monotonic()
        self._recent: deque[float] = deque(maxlen=PACE_OF + 1)
        """Durations of the last steps in seconds, from the rows. The differences of their times would include the pause
        before a resume."""
        self._latest: dict[str, Any] = {}
        self._evaluations: dict[str, EvaluationHistory] = {}
        self._rewards, self._evaluated = Sparkline(), dict[str, Sparkline]()
        self._state = "starting"

    def refresh(self, state: str = "") -> None:
        """Read new rows and show them; `state` describes what the supervisor is doing."""
        self._state = state or self._state
        for row in self._tail.read():
            self._take({name: value for name, value in row.items() if isinstance(value, int | float)})
        for warning in self._warnings.read():
            self.say(warning)
        read = filter(None, map(Raised.of, self._told.read()))
        told = [raised for raised in read if raised.name != STALL.name]  # detected below, while it lasts
        # After the last step no stall is reported, since the run waits for an evaluation and exports.
        silent = self._stall.silence(time.monotonic()) if self.unfinished or not self._steps else ()
        for raised in (*told, *silent):
            self.alarmed |= raised.stops
            self.say(str(raised))
        if self._live:
            self._live.update(self._render(), refresh=True)

    @property
    def last_step(self) -> int:
        """The last trained step that was shown; before any, that of the resume."""
        return int(self._latest.get("step", self._resumed))

    @property
    def last_step_s(self) -> float:
        """Seconds that the last step took; 0 if none did."""
        return self._recent[-1] if self._recent else 0.0

    @property
    def unfinished(self) -> bool:
        """Whether the last step is not trained yet."""
        return self._latest.get("step", 0) < self._steps

    def _take(self, row: Row) -> None:
        self.trained = True
        for raised in self._stall.row(row, time.monotonic()):
            self.say(str(raised))
        for name, evaluation in evaluations(row).items():
            self._evaluations.setdefault(name, EvaluationHistory()).add(evaluation, row["step"])
            if evaluation.mean is not None:
                self._evaluated.setdefault(name, Sparkline()).add(evaluation.mean)
        if not is_evaluation(row):
            if row["step"] < self._latest.get("step", 0):
                self._recent.clear()  # a resume went back, and may have another pace
            if isinstance(seconds := row.get("time/step"), int | float):
                self._recent.append(seconds)
            kept = {name: value for name, value in self._latest.items() if not BY_AGE.fullmatch(name)}
            self._latest = {**kept, **row}
            if row.get("reward/mean") is not None:
                self._rewards.add(row["reward/mean"])
        if self._live is None:
            say(self._console, format_line(row))

    def _eta(self) -> str:
        if len(self._recent) < 2 or not self._steps:
            return "--"
        _, *warm = self._recent  # the first step of a run waited for everything to start
        return clock(statistics.fmean(warm) * (self._steps - self._latest["step"]))

    def _render(self) -> Group:
        step = self._latest.get("step", self._resumed)
        most = f"/{self._steps}" if self._steps else ""
        head = Text(f"{self._state}   step {step}{most}   {self._elapsed()}   left {self._eta()}")
        bar = Table.grid()  # a bar without a table does not end its line
        bar.add_row(ProgressBar(total=self._steps or None, completed=step, width=60))
        table = [self._table()] if self._latest else []
        return Group(head, bar, *self.pressing(), *table, *self.below())

    def _elapsed(self) -> str:
        return f"elapsed {clock(time.monotonic() - self._started)}"

    def who_waits(self) -> str:
        """Return which side waited in the last step; see `who_waits`."""
        return who_waits(self._latest)

    def pressing(self) -> Sequence[Text]:
        """Texts above the table, where they are visible however long the table is."""
        return ()

    def below(self) -> Sequence[Table | Text]:
        """Contents below the table."""
        return ()

    def _table(self) -> Table:
        row = self._latest
        rows = (
            ("reward", [_cell(row, "reward/mean", "{:.3f}"), self._drawn(self._rewards)]),
            ("loss", [] if "reward/mean" in row else [_cell(row, "loss/total", "{:.4f}")]),
            *((f"eval {name}", [str(history)]) for name, history in self._evaluations.items()),
            *(("", [self._drawn(spark)]) for spark in self._evaluated.values() if len(self._evaluated) == 1),
            (
                "staleness",
                [
                    _cell(row, "staleness/mean", "mean {:.2f}"),
                    _cell(row, "staleness/max", "max {:.0f} versions"),
                    _cell(row, "staleness/dropped", "dropped {:.0f}"),
                ],
            ),
            ("  by age", by_age(row, "staleness/hist", "{:.0%}")),
            (
                "queue",
                [
                    _cell(row, "replay/in_flight", "{:.0f} groups in flight,"),
                    _cell(row, "replay/inserted", "{:.0f} wait,"),
                    _cell(row, "replay/leased", "{:.0f} planned"),
                ],
            ),
            ("  by age", by_age(row, "replay/inserted_age", "{:.0f}")),
            (
                "tokens/s",
                [
                    _cell(row, "perf/trained_tokens_per_s", "trained {:,.0f}"),
                    _cell(row, "perf/generated_tokens_per_s", "generated {:,.0f}"),
                ],
            ),
            ("rewards failed", [failed_rewards(row)]),
            ("who waits", [self.who_waits()]),
        )
        return facts((label, "  ".join(cell for cell in cells if cell)) for label, cells in rows)

    def _drawn(self, spark: Sparkline) -> str:
        """Return the curve; empty if the terminal cannot show its letters."""
        return str(spark) if "utf" in self._console.encoding.lower() else ""


def by_age(row: Row, name: str, form: str) -> list[str]:
    """Return `2: 73%` for each of the most frequent ages of `<name>_<age>`, in ascending order."""
    known = {int(key.rpartition("_")[2]): value for key, value in row.items() if key.startswith(f"{name}_") and value}
    most = sorted(known, key=known.__getitem__, reverse=True)[:MOST_AGES]
    more = sum(value for age, value in known.items() if age not in most)
    shown = [f"{age}: {form.format(known[age])}" for age in sorted(most)]
    return [*shown, f"others: {form.format(more)}"] if more else shown


def _cell(row: Row, name: str, form: str) -> str:
    value = row.get(name)
    return "" if value is None else form.format(value)
