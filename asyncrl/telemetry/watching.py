"""`asyncrl watch RUN`: a run that somebody else started, as its files and this machine's kernel tell of it.

consumes: the run folder, /proc · waits for: nothing; `look` is called about once a second
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.family import STOPPED, ProcessId
from asyncrl.plain_text import plain
from asyncrl.standstill import Standstills, who
from asyncrl.storage.occupancy import living_in
from asyncrl.telemetry.metrics import SAMPLES_FILE
from asyncrl.telemetry.progress import MetricsTail, RunView, clock

SHOWN = ("step", "reward", "prompt", "completion")
SAID, SAMPLES, TEXT = 6, 3, 160
"""Lines of news, and samples, that are shown, and characters of each text."""


@dataclass(slots=True)
class Seen:
    name: str
    state: str
    """`runs`, `stopped` or `gone`."""
    since: float


class WatchView(RunView):
    """As a run's own view; below it who lives in the run, what was said last, and the last samples.

    Args:
        living: who is in the run now.
    """

    def __init__(
        self,
        run_dir: Path,
        steps: int,
        console: Console,
        *,
        ignored: Sequence[str] = (),
        living: Callable[[Path], Sequence[ProcessId]] = living_in,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(run_dir, steps, console, ignored=ignored)
        self._run_dir, self._living, self._now = run_dir, living, now
        self._standstills = Standstills(clock=now)
        self._seen: dict[ProcessId, Seen] = {}
        self._said: list[str] = []
        self._samples_tail = MetricsTail(run_dir / SAMPLES_FILE)
        self._samples: list[dict[str, object]] = []
        self._moved = now()

    def look(self) -> bool:
        """Take in what is new and show it. False when nobody is in the run any more."""
        now, living = self._now(), list(self._living(self._run_dir))
        for process in living:
            state = "stopped" if process.state() in STOPPED else "runs"
            known = self._seen.get(process)
            if known is None or known.state != state:
                self._seen[process] = Seen(known.name if known else who(process), state, now)
        for process in set(self._seen) - set(living):
            if self._seen[process].state != "gone":
                self._seen[process] = Seen(self._seen[process].name, "gone", now)
                self.say(f"{self._seen[process].name} (pid {process.pid}) is gone")
        for said in self._standstills.look(living):
            self.say(said)
        self._samples = [*self._samples, *map(dict, self._samples_tail.read())][-SAMPLES:]
        before = self._latest.get("step")
        self.refresh("training" if living else "nobody is in this run")
        self._moved = now if self._latest.get("step") != before else self._moved
        return bool(living)

    def say(self, text: str) -> None:
        self._said = [*self._said, text][-SAID:]
        if self._live is None:
            super().say(text)

    def below(self) -> Sequence[Table | Text]:
        now = self._now()
        roles = Table("who", "pid", "state", "since", box=None, padding=(0, 2, 0, 0))
        for process, seen in sorted(self._seen.items(), key=lambda pair: (pair[1].name, pair[0].pid)):
            roles.add_row(seen.name, str(process.pid), seen.state, clock(now - seen.since))
        samples = Table(*SHOWN, box=None, padding=(0, 2, 0, 0))
        for row in self._samples:
            samples.add_row(*(one_line(str(row.get(key)))[:TEXT] for key in SHOWN))
        last = Text(f"last step {clock(now - self._moved)} ago")
        said = [one_line(text) for text in self._said]
        return [last, roles, *said, *([samples] if self._samples else [])]


def one_line(text: str) -> Text:
    """Nothing in it is taken for markup or for a command to the terminal."""
    return Text(" ".join(plain(text).split()))
