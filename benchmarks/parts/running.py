"""A run in progress, whose commands a benchmark starts as a user does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.cli.processes.ports import free_port
from benchmarks.parts.answer import ROOT
from benchmarks.parts.model import tiny_task

Found = TypeVar("Found")
ASYNCRL = (sys.executable, "-m", "asyncrl.cli")
PATIENCE_S = 600.0


class Running:
    """The processes of one run by name, each with a log. `stop` ends the run, and `kill` a process.

    Args:
        model: changes of the tiny model.
    """

    first = "local"
    """Name of the process whose end is that of the run."""

    def __init__(self, folder: Path, settings: Sequence[str], model: Mapping[str, int] | None = None) -> None:
        self.run_dir, self.folder = folder / "run", folder
        here = [f"run.dir={self.run_dir}", f"replay.address=tcp://127.0.0.1:{free_port()}", "learner.steps=1000000"]
        self.settings = [*tiny_task(folder, **(model or {})), *here, *settings]
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> None:
        """Start `command` with the settings, or else `asyncrl NAME`."""
        words = [*(command or (*ASYNCRL, name)), *self.settings]
        with self.log(name).open("wb") as log:
            self.started[name] = subprocess.Popen(
                words, cwd=ROOT, env=os.environ | (variables or {}), stdout=log, stderr=log
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of its metrics, without a last row that is still being written."""
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def wait(self, what: Callable[[], Found], why: str) -> Found:
        """waits for: something that the run writes; unblocked by: the end of `first`, or the deadline."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := what()):
            if self.started[self.first].poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"not within {PATIENCE_S:.0f} s: {why}\n{self.log(self.first).read_text()[-4000:]}")
            time.sleep(0.02)
        return found

    def end(self, name: str, number: int = signal.SIGINT) -> None:
        """Ask a process to end, and wait for it."""
        process = self.started.pop(name)
        process.send_signal(number)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()

    def audit(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*ASYNCRL, "audit", str(self.run_dir)], capture_output=True, text=True)
