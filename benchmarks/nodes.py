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
from benchmarks.parts.running import Running

LEARNER, REPLAY = ("bash", "launchers/learner.sh"), ("bash", "launchers/replay.sh")
ROLLOUT = (sys.executable, "launchers/rollout.py")
SAVE_EVERY = 10


class Cluster(Running):
    """The processes of one run. All of them are killed when the context ends."""

    first = "first"

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        settings = [
            *("resume=auto", "reward.function=asyncrl.rewards.exact_match:exact_match"),
            *("rollout.host=process", "rollout.workers=1", "rollout.group_size=4", "rollout.max_new_tokens=8"),
            *("data.max_prompt_tokens=32", "learner.groups_per_step=8", "learner.max_tokens_per_microbatch=1024"),
            f"learner.save_every={SAVE_EVERY}",
        ]
        super().__init__(folder, [*settings, *overrides])
        self._variables = {
            **{"RDZV_BACKEND": "c10d", "NNODES": "1:2", "RUN_ID": "nodes"},
            **{"RDZV_ENDPOINT": f"127.0.0.1:{free_port()}", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        }

    def __enter__(self) -> Cluster:
        self.add("replay", REPLAY)
        self.add("first", LEARNER)
        self.add("rollout", ROLLOUT)
        return self

    def __exit__(self, *raised: object) -> None:
        for name in list(self.started):
            self.kill(name)

    def add(self, name: str, command: tuple[str, ...] = LEARNER) -> None:
        self.start(name, command, self._variables)

    def kill(self, name: str) -> None:
        """Kill process `name` and all its descendants with -9, as when a machine loses power."""
        started = self.started.pop(name)
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(started.pid)
            for each in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        started.wait(60)

    def begun(self) -> list[tuple[int, int]]:
        """Return (ranks, first step) of each time that ranks began to train. Rank 0 logs it, on either machine."""
        said = "\n".join(path.read_text(errors="replace") for path in self.folder.glob("*.log"))
        found = sorted(re.findall(r"^(\S+ \S+) .* (\d+) ranks on .* from step (\d+)", said, re.MULTILINE))
        return [(int(ranks), int(step)) for _, ranks, step in found]

    def wait_steps(self, count: int) -> None:
        first = self.rows()[-1]["step"] if self.rows() else 0
        self.wait(lambda: bool(self.rows()) and self.rows()[-1]["step"] >= first + count, f"{count} more steps")

    def changed(self, ranks: int, change: Callable[[], None]) -> dict[str, float]:
        """Make the change. Returns what it cost until a step of `ranks` ranks was trained."""
        rounds, reached, at = len(self.begun()), 0, time.time()
        change()

        def together() -> bool:
            nonlocal reached
            reached = max(reached, self.rows()[-1]["step"])
            return ranks in [count for count, _ in self.begun()[rounds:]]

        self.wait(together, f"{ranks} ranks")
        begin = self.begun()[-1][1]
        # The rows of steps that are trained again are cut off when the rank begins, a moment before it logs so.
        self.wait(lambda: any(row["step"] > begin and row["time"] > at for row in self.rows()[-1:]), "a step of them")
        row = next(row for row in self.rows() if row["step"] > begin and row["time"] > at)
        return {"seconds": round(row["time"] - at, 1), "steps_trained_again": reached - begin}


def measured(folder: Path, steps: int, overrides: list[str]) -> dict[str, Any]:
    with Cluster(folder, overrides) as cluster:
        cluster.wait_steps(steps)
        joined = cluster.changed(2, lambda: cluster.add("second"))
        cluster.wait_steps(steps)
        lost = cluster.changed(1, lambda: cluster.kill("second"))
        cluster.wait_steps(steps)
    return {"joined": joined, "lost": lost, "audit_exit_code": cluster.audit().returncode}


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
