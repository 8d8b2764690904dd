"""How long does training stand still when a learner machine joins, and when one is lost?

    python -m benchmarks.nodes [--steps 25] [--repeats 1] [key=value ...]

Simulates two machines on one: `launchers/learner.sh` runs twice with `RDZV_BACKEND=c10d NNODES=1:2`, one rank each and
a shared folder, beside a replay server and a rollout worker as in a cluster. The second machine joins a run of one,
trains with it, and is killed with -9, its ranks included. Prints one JSON line: seconds from the start of the second
machine until the first step of two ranks is trained, seconds from its death until the first step of one rank, steps
that were trained again, and the exit code of `asyncrl audit`. Most of the time is torchrun's: 15 s until it calls a
silent machine lost, and 30 s in which it waits for more machines.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

os.environ.setdefault("OMP_NUM_THREADS", "1")
from asyncrl.cli.processes.ports import free_port
from benchmarks.parts.answer import ROOT, answer, parse
from benchmarks.parts.model import tiny_task
from benchmarks.parts.rows import rows_so_far

PATIENCE_S = 600.0
LEARNER, REPLAY = ("bash", "launchers/learner.sh"), ("bash", "launchers/replay.sh")
ROLLOUT = (sys.executable, "launchers/rollout.py")
SAVE_EVERY = 10


class Cluster:
    """The processes of one run by name, each with a log. All of them are killed when the context ends."""

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        self.run_dir, self._folder = folder / "run", folder
        self._settings = [
            *tiny_task(folder),
            *(f"run.dir={self.run_dir}", f"replay.address=tcp://127.0.0.1:{free_port()}", "resume=auto"),
            "reward.function=asyncrl.rewards.exact_match:exact_match",
            *("rollout.host=process", "rollout.workers=1", "rollout.group_size=4", "rollout.max_new_tokens=8"),
            *("data.max_prompt_tokens=32", "learner.groups_per_step=8", "learner.max_tokens_per_microbatch=1024"),
            *("learner.steps=1000000", f"learner.save_every={SAVE_EVERY}", *overrides),
        ]
        self._of_the_learner = {
            **{"RDZV_BACKEND": "c10d", "NNODES": "1:2", "RUN_ID": "nodes"},
            "RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        }
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        self.start("replay", REPLAY)
        self.start("first", LEARNER)
        self.start("rollout", ROLLOUT)
        return self

    def __exit__(self, *raised: object) -> None:
        for name in list(self._started):
            self.kill(name)

    def start(self, name: str, command: tuple[str, ...]) -> None:
        variables = os.environ | self._of_the_learner | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        with self.log(name).open("wb") as log:
            self._started[name] = subprocess.Popen(
                [*command, *self._settings], cwd=ROOT, env=variables, stdout=log, stderr=log
            )

    def kill(self, name: str) -> None:
        """Kill process `name` and all its descendants with -9, as when a machine loses power."""
        started = self._started.pop(name)
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(started.pid)
            for each in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        started.wait(60)

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def begun(self) -> list[tuple[int, int]]:
        """Return (ranks, first step) of each time that ranks began to train. Rank 0 logs it, on either machine."""
        said = "\n".join(path.read_text(errors="replace") for path in self._folder.glob("*.log"))
        found = sorted(re.findall(r"^(\S+ \S+) .* (\d+) ranks on .* from step (\d+)", said, re.MULTILINE))
        return [(int(ranks), int(step)) for _, ranks, step in found]

    def steps(self) -> list[dict[str, Any]]:
        return rows_so_far(self.run_dir)

    def wait(self, what: Callable[[], bool], why: str) -> None:
        """waits for: something that the run writes; unblocked by: the first machine's end, or the deadline."""
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            if self._started["first"].poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"not within {PATIENCE_S:.0f} s: {why}\n{self.log('first').read_text()[-4000:]}")
            time.sleep(0.1)

    def wait_steps(self, count: int) -> None:
        first = self.steps()[-1]["step"] if self.steps() else 0
        self.wait(lambda: bool(self.steps()) and self.steps()[-1]["step"] >= first + count, f"{count} more steps")

    def changed(self, ranks: int, change: Callable[[], None]) -> dict[str, float]:
        """Make the change. Returns what it cost until a step of `ranks` ranks was trained."""
        rounds, reached, at = len(self.begun()), 0, time.time()
        change()

        def together() -> bool:
            nonlocal reached
            reached = max(reached, self.steps()[-1]["step"])
            return ranks in [count for count, _ in self.begun()[rounds:]]

        self.wait(together, f"{ranks} ranks")
        begin = self.begun()[-1][1]
        # The rows of steps that are trained again are cut off when the rank begins, a moment before it logs so.
        self.wait(lambda: any(row["step"] > begin and row["time"] > at for row in self.steps()[-1:]), "a step of them")
        row = next(row for row in self.steps() if row["step"] > begin and row["time"] > at)
        return {"seconds": round(row["time"] - at, 1), "steps_trained_again": reached - begin}


def measured(folder: Path, steps: int, overrides: list[str]) -> dict[str, Any]:
    with Cluster(folder, overrides) as cluster:
        cluster.wait_steps(steps)
        joined = cluster.changed(2, lambda: cluster.start("second", LEARNER))
        cluster.wait_steps(steps)
        lost = cluster.changed(1, lambda: cluster.kill("second"))
        cluster.wait_steps(steps)
    audit = subprocess.run([sys.executable, "-m", "asyncrl.cli", "audit", str(cluster.run_dir)], capture_output=True)
    return {"joined": joined, "lost": lost, "audit_exit_code": audit.returncode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25, help="that are trained before each change")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parse(parser, {"steps": 3})
    runs = []
    for _ in range(given.repeats):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(measured(Path(folder), given.steps, given.overrides))
    medians = {
        change: {name: statistics.median(run[change][name] for run in runs) for name in runs[0][change]}
        for change in ("joined", "lost")
    }
    answer("nodes", {**medians, "audit_exit_code": max(run["audit_exit_code"] for run in runs)}, smoke=given.smoke)


if __name__ == "__main__":
    main()
