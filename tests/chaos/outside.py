"""Chaos from outside: kill -9 every kind of process of `asyncrl local`, knowing only pids and the run folder.

    python -m tests.chaos.outside --kills 60 --host process|ray --seed N [--uses K] [--folder DIR] [KEY=VALUE ...]

The run has the quickstart's task and model at default staleness. With `--uses K` (`replay.max_times_sampled`) the bound
is 16, which no group reaches: every group is then trained in exactly K steps, unless the run ends first. Restarting a
killed process is left to its supervisor. When `asyncrl local` itself is gone (killed, or ended by a death that it could
not recover from), it is started again with resume=auto, as the documentation says. At the end the run is finished
without faults, and `outside_reader.py` judges its folder.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil

from asyncrl.quickstart.prepare import prepare
from asyncrl.quickstart.recipes import WarmupRecipe
from tests.alive import is_alive

from .outside_reader import Findings, judge, rows

PROGRESS_S = 600.0
"""Seconds without a new trained step, and without a kill, after which the run counts as stalled."""
LEAVE_S = 30.0
"""Seconds that the children of a killed `asyncrl local` have to end."""
BOUND, BOUND_OF_REUSE = 4, 16
ENDINGS = (signal.SIGTERM, signal.SIGHUP)
KINDS = {
    "raylet": ("raylet/raylet",),
    "gcs": ("gcs_server",),
    "ray worker": ("ray::RolloutWorker",),
    "ray other": ("ray::", "ray/dashboard", "ray/_private"),
    "replay": ("asyncrl.replay",),
    "torchrun": ("torch.distributed.run", "asyncrl.learner.torchrun"),
    "rank": ("asyncrl.learner",),
    "pool": ("asyncrl.rollout",),
    "forkserver": ("multiprocessing.forkserver",),
    "spawned": ("multiprocessing.spawn", "multiprocessing.resource_tracker"),
}
"""Kind -> substrings of its command line. The first kind that matches counts."""


@dataclass
class Tally:
    kills: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    ended_by_itself: int = 0
    left_behind: Counter[str] = field(default_factory=Counter)
    """Kind -> number of processes that outlived a killed `asyncrl local`."""


def kind_of(process: psutil.Process) -> str:
    """Return the kind of a process; empty if it has ended."""
    try:
        words = " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
    return next((kind for kind, signs in KINDS.items() if any(sign in words for sign in signs)), "other")


def kill(process: psutil.Process) -> bool:
    if not is_alive(process):
        return False
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


class Outside:
    """One run folder, and the `asyncrl local` process that works on it at the moment."""

    def __init__(self, folder: Path, host: str, seed: int, uses: int = 1, more: Sequence[str] = ()) -> None:
        self.folder, self.host, self.uses, self.more = folder, host, uses, more
        self.bound = BOUND if uses == 1 else BOUND_OF_REUSE
        self.random = random.Random(seed)
        self.tally = Tally()
        self.task = prepare(WarmupRecipe())
        self.process: subprocess.Popen[bytes] | None = None
        self.family: dict[psutil.Process, str] = {}
        """The processes seen so far, each with its kind."""

    def start(self, steps: int) -> None:
        settings = {
            "experiment": "quickstart",
            "model.path": self.task / "model",
            "data.path": self.task / "train.jsonl",
            "eval.path": self.task / "heldout.jsonl",
            "run.dir": self.folder,
            "resume": "auto",
            "replay.max_staleness": self.bound,
            "replay.max_times_sampled": self.uses,
            "rollout.host": self.host,
            "learner.steps": steps,
            "learner.schedule": "constant",
        }
        self.tally.starts += 1
        with (self.folder.parent / "local.log").open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.cli", "local", *(f"{k}={v}" for k, v in settings.items()), *self.more],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def look(self) -> dict[psutil.Process, str]:
        """Return the processes below the run's, each with its kind."""
        found: dict[psutil.Process, str] = {}
        if self.process is not None and self.running:
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(self.process.pid).children(recursive=True)
                found = {child: kind for child in children if (kind := kind_of(child))}
        self.family |= found
        return found

    def trained(self) -> int:
        """Return the number of steps ever trained, undone ones included. It grows as long as the run makes progress."""
        return sum(line["event"] == "trained" for line in rows(self.folder / "ledger.jsonl"))

    def until_trained(self, more: int, steps: int) -> None:
        """Wait until `more` further steps are trained. Start the run again whenever it has ended.

        Raises:
            TimeoutError: no step was trained for `PROGRESS_S`.
        """
        goal = self.trained() + more
        seen, deadline = -1, time.monotonic() + PROGRESS_S
        while (now := self.trained()) < goal:
            if now > seen:
                seen, deadline = now, time.monotonic() + PROGRESS_S
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step was trained for {PROGRESS_S:.0f} s after {now} of them; {self.folder}")
            if not self.running:
                self.tally.ended_by_itself += 1
                self.clear()
                self.start(steps)
            self.look()
            time.sleep(0.5)

    def clear(self) -> None:
        """Count and kill the processes that outlived `asyncrl local`, so that the next one begins alone."""
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline and any(map(is_alive, self.family)):
            time.sleep(0.5)
        for process, kind in self.family.items():
            if kill(process):
                self.tally.left_behind[kind] += 1
        self.family.clear()

    def strike(self, steps: int) -> None:
        """Kill one process of a randomly drawn kind."""
        everybody = self.look()
        kinds = sorted({*everybody.values(), "local"})
        kind = self.random.choice(kinds)
        if kind == "local":
            assert self.process is not None
            self.process.kill()
            self.process.wait()
            self.tally.kills[kind] += 1
            self.clear()
            self.start(steps)
            return
        victims = [process for process, its_kind in everybody.items() if its_kind == kind]
        self.tally.kills[kind] += kill(self.random.choice(sorted(victims, key=lambda process: process.pid)))

    def end(self) -> None:
        """Finish the run without faults, at a step beyond all that were trained."""
        if self.process is not None and self.running:
            self.process.kill()
            self.process.wait()
            self.clear()
        steps = max((row["step"] for row in rows(self.folder / "metrics.jsonl")), default=0) + 60
        for _ in range(5):
            self.start(steps)
            assert self.process is not None
            if self.process.wait(1800) == 0:
                return
            self.clear()
        raise RuntimeError(f"the run could not be finished; see {self.folder.parent / 'local.log'}")

    def stop(self) -> None:
        if self.process is not None and self.running:
            self.look()
            self.process.kill()
            self.process.wait()
        self.clear()


def line_of(tally: Tally, found: Findings, host: str, seconds: float) -> str:
    kills = ", ".join(f"{kind} {count}" for kind, count in sorted(tally.kills.items()))
    dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(found.dropped.items())) or "none"
    uses = ", ".join(f"{groups} in {number}" for number, groups in sorted(found.trained_in.items()))
    left = ", ".join(f"{kind} {count}" for kind, count in sorted(tally.left_behind.items())) or "none"
    return (
        f"host {host}, {sum(tally.kills.values())} kills in {seconds:.0f} s ({kills}); {tally.starts} starts, "
        f"{tally.ended_by_itself} after an end by itself, left behind by a dead local: {left}; {found.acknowledged} "
        f"groups acknowledged, {found.trained} trained in {found.steps} steps (each: {uses}; {found.retired} retired), "
        f"{found.lost} lost, {found.twice} trained too often; dropped after they came: {dropped}; {found.restores} "
        f"restores undid {found.undone} groups, {100 * found.share:.2f} % of them trained again (lowest "
        f"{100 * found.lowest_share:.2f} %), {found.steps_same} of {found.steps_undone} steps the same; "
        f"broken: {'; '.join(found.broken) or 'nothing'}"
    )


def end_tidily(number: int, _frame: FrameType | None = None) -> None:
    """Signal handler. Without it SIGTERM ends this process at once, and the run that it drives trains on for ever."""
    for ending in ENDINGS:
        signal.signal(ending, signal.SIG_IGN)  # a second signal must not interrupt the cleanup that follows
    sys.exit(128 + number)


def main() -> int:
    for ending in ENDINGS:
        signal.signal(ending, end_tidily)
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--kills", type=int, default=60)
    arguments.add_argument("--host", choices=("process", "ray"), default="process")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--uses", type=int, default=1, metavar="K", help="steps that each group is trained in")
    arguments.add_argument("--folder", type=Path, default=None)
    arguments.add_argument("more", nargs="*", metavar="KEY=VALUE", help="further settings of the run")
    given = arguments.parse_args()
    root = given.folder or Path(tempfile.mkdtemp(prefix="asyncrl-outside-"))
    root.mkdir(parents=True, exist_ok=True)
    outside = Outside(root / "run", given.host, given.seed, given.uses, given.more)
    started, steps = time.monotonic(), 1_000_000
    try:
        outside.start(steps)
        while sum(outside.tally.kills.values()) < given.kills:
            outside.until_trained(outside.random.randint(1, 40), steps)
            outside.strike(steps)
            print(f"{time.monotonic() - started:.0f} s: {dict(outside.tally.kills)}", file=sys.stderr, flush=True)
        outside.until_trained(1, steps)
        outside.end()
    finally:
        outside.stop()
    found = judge(outside.folder, outside.bound, given.uses)
    print(line_of(outside.tally, found, given.host, time.monotonic() - started), flush=True)
    return 0 if not (found.lost or found.twice or found.broken) and found.lowest_share >= 0.99 else 1


if __name__ == "__main__":
    sys.exit(main())
