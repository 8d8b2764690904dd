"""Run the quickstart's task as a user starts it, for the benchmarks of whole runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from asyncrl.telemetry.metrics.evaluations import is_evaluation

ACCURACY = "eval/heldout/accuracy"
SMALL = (
    *("rollout.host=process", "rollout.group_size=2", "learner.groups_per_step=4", "learner.steps=4", "eval.every=2"),
    *("eval.rows=8", "eval.chunk=8"),
)
"""Settings of the smallest run. It shows only that everything works."""
POLL_S = 0.5


@dataclass(frozen=True)
class Run:
    launched: float
    """Unix time; so is `ended`."""
    ended: float
    rows: list[dict[str, Any]]
    """Rows of its metrics, one per step."""
    evaluations: list[dict[str, Any]]
    """Rows of its evaluations, in the order in which they were written."""

    def evaluated(self, measured: str = ACCURACY) -> list[dict[str, Any]]:
        """Return the evaluations that have the metric `measured`, in the order of their steps."""
        return sorted((row for row in self.evaluations if measured in row), key=lambda row: row["step"])


def run_quickstart(
    run_dir: Path, settings: Sequence[str], watch: Callable[[psutil.Process, str], None] = lambda process, command: None
) -> Run:
    """Run `asyncrl quickstart` with `settings` to its end.

    Args:
        watch: called every half second with each process started since the launch, and its command line. It gets all
            processes of the machine, since Ray's are not children of the run.

    Raises:
        SystemExit: the run failed. The message has the end of its output.
    """
    launched = time.time()
    run_dir.mkdir(parents=True)
    said = run_dir.with_suffix(".log")
    with said.open("wb") as output:
        command = [sys.executable, "-m", "asyncrl.cli", "quickstart", f"run.dir={run_dir}", *settings]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while True:
            for other in psutil.process_iter():
                try:
                    if other.create_time() >= launched:
                        watch(other, " ".join(other.cmdline()))
                except psutil.Error:  # it has ended meanwhile
                    continue
            try:
                code = process.wait(POLL_S)
                break
            except subprocess.TimeoutExpired:
                continue
    if code:
        raise SystemExit(f"{' '.join(command)}\nended with exit code {code}:\n{said.read_text()[-4000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps, evaluations = ([row for row in rows if is_evaluation(row) == wanted] for wanted in (False, True))
    return Run(launched, time.time(), steps, evaluations)
