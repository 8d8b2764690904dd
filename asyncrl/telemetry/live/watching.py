"""`asyncrl watch RUN`: shows a run that another process started, from its files and this machine's processes.

consumes: the run folder, /proc · waits for: nothing; `look` is called about once a second
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.config import LOG_DIR
from asyncrl.plain_text import plain
from asyncrl.storage.full_disk import BOARD_FILE, read_board
from asyncrl.storage.lines import TAIL_BYTES
from asyncrl.storage.occupancy import living_in
from asyncrl.telemetry.live.over import ENDS_FILE, ends_in
from asyncrl.telemetry.live.progress import RunView
from asyncrl.telemetry.live.tails import MetricsTail, Row
from asyncrl.telemetry.metrics.advice import tuning_advice
from asyncrl.telemetry.metrics.log import SAMPLES_FILE, fate_of
from asyncrl.telemetry.metrics.printed import clock
from asyncrl.utils.process_tree import age_s, ancestors, command_of, descendants, is_alive, is_stopped
from asyncrl.utils.stopped_processes import NAMED_S, RANK, TORCHRUN, WORKER, Kind, StoppedProcesses, kind_of, who

SHOWN = ("step", "reward", "prompt", "completion")
ITS_GROUPS, NOBODY = "its groups wait", "nobody waits yet"
"""Who waits for a stopped process: for a worker, while another worker runs, and for a process that only starts others.
"""
ELSEWHERE_S = 120.0
"""If a run's files were written within this many seconds, on a disk that several machines may share, the run may
continue on another machine."""
ADVICE_STEPS = 10
"""Number of the last steps on which the advice is based; with fewer there is none."""
FIRST_WORD_S = 15.0
"""Seconds until it is said again what a run waits for that has trained no step."""
FIRST = ((WORKER, "a rollout worker"), (RANK, "a learner rank"))
LAST_BYTES = 4096
SAID, SAMPLES, TEXT = 6, 3, 160
"""Number of messages and of samples shown, and characters shown of each text."""


@dataclass(slots=True)
class Seen:
    name: str
    state: str
    """`runs`, `stopped` or `gone`."""
    since: float
    kind: Kind | None = None
    exact: bool = True
    """Whether `since` is the time of the change to this state; otherwise that of the first look."""


def in_run(folder: Path) -> list[psutil.Process]:
    """Return the processes of a run: those that hold its lock, their ancestors that belong to a run, such as torchrun,
    and their descendants that others wait for, such as reward processes."""
    own = living_in(folder)
    above = {each for process in own for each in ancestors(process.pid) if kind_of(command_of(each)) is not None}
    below = {
        each
        for each in descendants(*(process.pid for process in own))
        if (kind := kind_of(command_of(each))) and kind.waits
    }
    return [*own, *((above | below) - set(own))]


class WatchView(RunView):
    """The run's own view, and below it the processes of the run, the last messages, and the last samples.

    Args:
        bounds: `replay.pipeline_depth` and `replay.max_staleness`, for the advice which setting to change; None: none.
        living: returns the processes that are in the run now.
    """

    def __init__(
        self,
        run_dir: Path,
        steps: int,
        console: Console,
        *,
        ignored: Sequence[str] = (),
        bounds: tuple[int, int] | None = None,
        living: Callable[[Path], Sequence[psutil.Process]] = in_run,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(run_dir, steps, console, ignored=ignored)
        self._run_dir, self._living, self._now = run_dir, living, now
        self._stopped = StoppedProcesses(clock=now)
        self._seen: dict[psutil.Process, Seen] = {}
        self._said: list[str] = []
        self._began = self._next_word = now()
        self._samples_tail = MetricsTail(run_dir / SAMPLES_FILE, TAIL_BYTES)
        self._samples: list[dict[str, object]] = []
        self._moved, self._trained_s = now(), 0.0
        self._bounds, self._last_rows = bounds, deque[Row](maxlen=ADVICE_STEPS)
        self._board = run_dir / LOG_DIR / BOARD_FILE
        self._notice = read_board(self._board)
        self._over = False
        self._waits: dict[tuple[str, float], str] = {}
        self._lasting = set[tuple[str, float]]()

    def look(self) -> bool:
        """Read what is new and show it. Returns False if no process is in the run any more."""
        now, living = self._now(), self._there()
        self._notice_who(living, now)
        self._notice_board()
        for said in self._stopped.look(living):
            self.say(said)
        self._notice_waits(now, bool(living))
        if living:
            self._notice_start(now)
        self._samples = [*self._samples, *map(dict, self._samples_tail.read())][-SAMPLES:]
        before = self._latest.get("step")
        self._over = not living
        self.refresh("training" if living else "no process of this run is left")
        self._moved = now if self._latest.get("step") != before else self._moved
        return bool(living)

    def _there(self) -> list[psutil.Process]:
        """Return the processes in the run, and those that were in it and have not ended: torchrun is only found through
        its ranks, and restarts them. Processes of a cluster outlive the run."""
        living = list(self._living(self._run_dir))
        known = [process for process in self._seen if process not in living and is_alive(process)]
        return [*living, *(each for each in known if living or self._seen[each].kind is TORCHRUN)]

    def _notice_who(self, living: Sequence[psutil.Process], now: float) -> None:
        # First: a process that was replaced since the last look must be gone when its successor comes.
        for process in set(self._seen) - set(living):
            gone = self._seen[process]
            if gone.state != "gone":
                gone.state, gone.since, gone.exact = "gone", now, True
                self.say(f"{gone.name} (pid {process.pid}) has ended")
        for process in living:
            state = "stopped" if is_stopped(process) else "runs"
            known = self._seen.get(process)
            if known is None:
                kind = kind_of(command_of(process))
                name = who(process)
                self._replaced(name)
                since = now - age_s(process) if state == "runs" else now
                self._seen[process] = Seen(name, state, since, kind, exact=state == "runs")
            elif known.state != state:
                known.state, known.since, known.exact = state, now, True

    def _replaced(self, name: str) -> None:
        """Forget the process of this name that went first, since a new one has replaced it."""
        gone = [process for process, seen in self._seen.items() if seen.state == "gone" and seen.name == name]
        if gone:
            del self._seen[min(gone, key=lambda process: self._seen[process].since)]

    def _notice_board(self) -> None:
        text = read_board(self._board)
        if text and text != self._notice:
            self.say(text)
        self._notice = text

    def _notice_waits(self, now: float, living: bool) -> None:
        """Update the waits. Without a live display, print each that has lasted for `NAMED_S`, once."""
        self._waits = dict(self._waiting()) if living else {}
        self._lasting &= self._waits.keys()
        for known, text in self._waits.items():
            if self._live is None and known not in self._lasting and now - known[1] >= NAMED_S:
                self._lasting.add(known)
                super().say(text)

    def _notice_start(self, now: float) -> None:
        """Without a live display, say what the run waits for while no step is trained: at once, then ever more
        rarely."""
        if self._live is not None or self._latest or now < self._next_word:
            return
        self._next_word = now + max(FIRST_WORD_S, now - self._began)
        running = {seen.kind for seen in self._seen.values() if seen.state == "runs"}
        missing = [name for kind, name in FIRST if kind not in running]
        what = f"{' and '.join(missing)} to start" if missing else "the first batch"
        last = [
            f"{log.stem}: {line}" for log in sorted((self._run_dir / LOG_DIR).glob("*.log")) if (line := _last(log))
        ]
        words = f" Last lines of the logs: {'; '.join(last)}" if last else ""
        super().say(f"no step is trained yet, after {clock(now - self._began)} of watching: waits for {what}.{words}")

    def _waiting(self) -> Iterator[tuple[tuple[str, float], str]]:
        """Iterate over the current waits, as `X waits for Y since ...`, with what does not happen until then."""
        ending = (self._run_dir / LOG_DIR / ENDS_FILE).exists()
        running = {seen.kind for seen in self._seen.values() if seen.state == "runs"}
        for process, seen in sorted(self._seen.items(), key=lambda pair: pair[1].since):
            if seen.state == "runs" or seen.kind is None or (ending and seen.state == "gone"):
                continue
            waits = ITS_GROUPS if seen.kind is WORKER and WORKER in running else seen.kind.waits
            said = "stopped by a signal" if seen.state == "stopped" else "it ended and was not restarted yet"
            whom = f"{waits or NOBODY} for {seen.name} (pid {process.pid}) since {self._at(seen)}"
            yield (str(process.pid), seen.since), f"{whom}: {said}; until then {seen.kind.follows}"

    def _at(self, seen: Seen) -> str:
        """Format the time of a change as `07:55:12, 0:08 ago`."""
        ago = self._now() - seen.since
        moment = time.strftime("%H:%M:%S", time.localtime(time.time() - ago))
        return f"{moment}{'' if seen.exact else ' or before'}, {clock(ago)} ago"

    def _take(self, row: Row) -> None:
        super()._take(row)
        seconds = row.get("time/step")
        self._trained_s += seconds if isinstance(seconds, int | float) else 0.0
        if "idle/learner" in row:
            self._last_rows.append(row)

    def _elapsed(self) -> str:
        """The time for which the run trained, without pauses; not the time for which it was watched."""
        return f"trained for {clock(self._trained_s)}, last step {clock(self._now() - self._moved)} ago"

    def say(self, text: str) -> None:
        alarm, at, _ = text.partition(" at step ")
        others = [each for each in self._said if not (at and each.startswith(alarm + at))]  # the last of each alarm
        self._said = [*others, text][-SAID:]
        if self._live is None:
            super().say(text)

    def who_waits(self) -> str:
        """As in the last step, unless one of the two sides was here and no process of it runs any more."""
        for side, waits in ((WORKER, "learner waits for rollouts"), (RANK, "rollouts wait for learner")):
            states = [seen.state for seen in self._seen.values() if seen.kind is side]
            if states and "runs" not in states and not self._over:
                return f"{waits}: no {side.name.partition(' ')[2]} runs on this machine"
        return super().who_waits()

    def pressing(self) -> Sequence[Text]:
        return [Text(text, style="bold red") for text in self._waits.values()]

    def below(self) -> Sequence[Table | Text]:
        head = self._ended() if self._over else [self._roles()]
        samples = Table(*SHOWN, box=None, padding=(0, 2, 0, 0))
        for row in self._samples:
            samples.add_row(*(one_line(cell)[:TEXT] for cell in sample_cells(row)))
        said = [one_line(text) for text in self._said]
        advice = [Text(f"advice: {text}")] if (text := self._advice()) else []
        return [*head, *advice, *said, *([samples] if self._samples else [])]

    def _advice(self) -> str:
        """Return which setting to change, by the means of the last steps."""
        if self._bounds is None or len(self._last_rows) < ADVICE_STEPS:
            return ""
        names = ("idle/learner", "idle/rollout", "staleness/mean")
        means = {name: statistics.fmean(row.get(name) or 0.0 for row in self._last_rows) for name in names}
        return tuning_advice({**self._last_rows[-1], **means}, *self._bounds)

    def _last_step(self) -> Text:
        """Describe the last step of a finished run."""
        step = self._latest.get("step", 0)
        when = f", at {moment(self._latest['time'])}" if "time" in self._latest else ""
        rest = f". It is not finished: resume=auto continues from the newest checkpoint (run.dir={self._run_dir})"
        most = f" of {self._steps}" if self._steps else ""
        return Text(f"this run has ended. Its last step was {step}{most}{when}{rest * self.unfinished}")

    def _written_ago(self) -> float | None:
        """Return the seconds since the last write to the folder if the run may continue on another machine: none of its
        processes was seen here, and its end was not recorded. None otherwise."""
        if self._seen or (self._run_dir / LOG_DIR / ENDS_FILE).exists():
            return None
        files = [*self._run_dir.glob("*.jsonl"), *(self._run_dir / LOG_DIR).glob("*.log")]
        ago = time.time() - max((file.stat().st_mtime for file in files), default=0.0)
        return ago if ago < ELSEWHERE_S else None

    def _ended(self) -> list[Table | Text]:
        """Show how the roles ended, according to their logs."""
        if (ago := self._written_ago()) is not None:
            said = f"no process of this run is on this machine, but its files were written {clock(max(0.0, ago))} ago. "
            said += "If it runs on other machines, watch it there: `ssh -t HOST asyncrl watch RUN`"
            return [Text(f"{said}. Its last step was {self._latest.get('step', 0)}")]
        ends = list(ends_in(self._run_dir / LOG_DIR))
        table = Table("who", "how it ended", "its last word", box=None, padding=(0, 2, 0, 0))
        for end in ends:
            table.add_row(end.name, end.how, moment(end.last_word))
        errors = [one_line(f"{end.name}: {end.error}") for end in ends if end.error]
        return [self._last_step(), table, *errors]

    def _roles(self) -> Table:
        now = self._now()
        roles = Table("who", "pid", "state", "since", box=None, padding=(0, 2, 0, 0))
        alike: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for process, seen in sorted(self._seen.items(), key=lambda pair: (pair[1].name, pair[0].pid)):
            alike.setdefault((seen.name, seen.state), []).append((process.pid, seen.since))
        for (name, state), found in alike.items():
            many = f" x {len(found)}" * (len(found) > 1)
            pids = f"{found[0][0]} ..." if many else str(found[0][0])
            roles.add_row(f"{name}{many}", pids, state, f"{clock(now - max(since for _, since in found))} ago")
        return roles


def _last(log: Path) -> str:
    """Return the last line of a log that is not blank, cut; empty if there is none."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return plain(lines[-1].strip())[:TEXT] if lines else ""
    return ""


def sample_cells(row: Row) -> list[str]:
    """Return the cells of `SHOWN`; for a dropped group, the reason precedes the completion."""
    step, reward, prompt, completion = ("" if row.get(key) is None else str(row[key]) for key in SHOWN)
    fate = fate_of(row)
    return [step, reward, prompt, f"[{fate}] {completion}" if fate else completion]


def moment(time_s: float) -> str:
    """Format seconds since the epoch as `2026-11-25 07:55:12, 0:08 ago`."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(time_s))}, {clock(time.time() - time_s)} ago"


def one_line(text: str) -> Text:
    """Return the text as one line, in which nothing is interpreted as markup or as a terminal command."""
    return Text(" ".join(plain(text).split()))
