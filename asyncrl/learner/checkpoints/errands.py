"""Background work on a checkpoint once it is durable: a second copy, and an exported model.

Each errand is a process of its own, with low priority, a deadline and retries. Training never waits for it; a failure
is counted and logged, and ends nothing.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.checks.machine import unopenable
from asyncrl.errors import ConfigError
from asyncrl.log_rate import is_power_of_ten
from asyncrl.storage.checkpoints import exported, finished
from asyncrl.storage.full_disk import post
from asyncrl.utils.process_tree import dying_with_this

log = logging.getLogger(__name__)

TRIES = 3
PAUSE_S = 10.0
"""Seconds before the first retry; twice as long before the second."""
TOUCHED_S = 240.0
"""Seconds to find out whether copies may be written to their target. A full store may take a minute to list; the ranks
that wait for this one give up after ten minutes."""
NICE = 10
WAITING = {"copies": 1, "exports": 2}
"""How many errands of a kind wait for their turn. Each keeps its checkpoint, so a further one takes the place of the
oldest: where errands are slower than saves, the disk would fill with checkpoints."""
RANK_OF_TORCHRUN = ("TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    kind: str
    """`copies` or `exports`, as in the metrics."""
    what: str
    """Description: `the copy of step_50 to s3://...`."""
    checkpoint: Path
    arguments: tuple[str, ...]
    """Arguments of Python."""


def _export(checkpoint: Path, steps: int) -> Errand:
    what, arguments = f"the export of {checkpoint.name}", (str(checkpoint.parent.parent), str(steps))
    return Errand(kind="exports", what=what, checkpoint=checkpoint, arguments=("-m", "asyncrl.cli.export", *arguments))


class Errands:
    """Runs errands one after another, on a thread, on rank 0.

    Waits for: the process of an errand, at most `within_s`. Unblocked by: its end.

    Args:
        copy_to: URL for second copies; empty makes none.
        export_every: steps between exported models; 0 is none.
        board: where skipped exports and the wait at the end are shown, see `storage.full_disk.post`.

    Raises:
        ConfigError: fsspec does not support the URL, or lacks the package for it.
    """

    def __init__(
        self,
        *,
        copy_to: str = "",
        export_every: int = 0,
        within_s: float = 3600.0,
        board: Path | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        for problem in unopenable("learner.copy_to", copy_to):
            raise ConfigError(problem)
        self._copy_to, self._export_every = copy_to, export_every
        self._within_s, self._board, self._sleep = within_s, board, sleep
        self._open: list[Errand] = []
        self._lock = threading.Condition()
        self._counts: dict[str, float] = {}
        self._exports_left_out = 0
        self._thread: threading.Thread | None = None

    def begin(self, run: str) -> None:
        """Check the target before the first step of a run; otherwise the first copy would fail after hours of training.

        Waits for: a process that writes to the target, at most `TOUCHED_S`.

        Raises:
            ConfigError: the target cannot be written, or contains checkpoints of another run.
        """
        if not self._copy_to:
            return
        why = run_beside(("-m", "asyncrl.storage.second_copy", "--begin", run, self._copy_to), TOUCHED_S)
        if why:
            raise ConfigError(f"learner.copy_to={self._copy_to}: checkpoints cannot be copied there: {why}")

    def saved(self, checkpoint: Path, steps: int) -> None:
        """Start the errands of a checkpoint that became durable, after `steps` steps."""
        errands = self._copies(checkpoint)
        if self._export_every and not steps % self._export_every:
            errands.append(_export(checkpoint, steps))
        self.send(errands)

    def resumed(self, checkpoint: Path) -> None:
        """Start the errands of a checkpoint that the run continues from, because a crash may have come before its copy,
        and before its export and those of older checkpoints, which were kept for that. Complete results are kept."""
        errands = self._copies(checkpoint)
        if self._export_every:
            for path in finished(checkpoint.parent):
                steps = int(path.name.removeprefix("step_"))
                if not steps % self._export_every and not exported(path).is_dir():
                    errands.append(_export(path, steps))
        self.send(errands)

    def _copies(self, checkpoint: Path) -> list[Errand]:
        if not self._copy_to:
            return []
        what = f"the copy of {checkpoint.name} to {self._copy_to}"
        arguments = ("-m", "asyncrl.storage.second_copy", str(checkpoint), self._copy_to)
        return [Errand(kind="copies", what=what, checkpoint=checkpoint, arguments=arguments)]

    def send(self, errands: Sequence[Errand]) -> None:
        """Queue errands; returns at once."""
        with self._lock:
            self._leave_out_older(errands)
            for errand in errands:
                self._open.insert(self._turn_of(errand), errand)
                for name in (f"checkpoint/{errand.kind}", f"checkpoint/{errand.kind}_failed"):
                    self._counts.setdefault(name, 0.0)
            if self._open and self._thread is None:
                self._thread = threading.Thread(target=self._main, name="errands", daemon=True)
                self._thread.start()

    def _leave_out_older(self, errands: Sequence[Errand]) -> None:
        """Drop as many of the errands that wait as newer ones have no place, see `WAITING`."""
        for kind, most in WAITING.items():
            new = sum(each.kind == kind for each in errands)
            waiting = [each for each in self._open[1:] if each.kind == kind]
            for older in waiting[: min(new, max(0, len(waiting) + new - most))]:
                self._open.remove(older)
                self._counts[f"checkpoint/{kind}_failed"] += 1
                text = f"{older.what} is skipped: a newer one is due, and {self._open[0].what} is still running"
                log.error("%s", text)
                self._exports_left_out += kind == "exports"
                if kind == "exports" and is_power_of_ten(self._exports_left_out):
                    post(self._board, f"{text}. A larger learner.export_every leaves time for each")

    def _turn_of(self, errand: Errand) -> int:
        """Copies before exports that wait: a model can be exported later, a checkpoint is gone with its disk."""
        if errand.kind == "exports":
            return len(self._open)
        return next((i for i, each in enumerate(self._open) if i and each.kind == "exports"), len(self._open))

    def needed(self) -> set[str]:
        """Names of checkpoints that pending errands still need."""
        with self._lock:
            return {errand.checkpoint.name for errand in self._open}

    def counts(self) -> dict[str, float]:
        """Errands done and failed since the start, by kind."""
        with self._lock:
            return dict(self._counts)

    def finish(self, within_s: float) -> None:
        """Wait for pending errands; log those that are not done in time, and abandon them."""
        with self._lock:
            if self._open:
                what = "; ".join(each.what for each in self._open)
                log.info("waiting for %s, at most %.0f s", what, within_s)
                post(self._board, f"the end of the run waits for {what}, at most {within_s:.0f} s")
            self._lock.wait_for(lambda: not self._open, within_s)
            for errand in self._open:
                log.error("%s was not finished within %.0f s of the end, so it is missing", errand.what, within_s)

    def _main(self) -> None:
        while True:
            with self._lock:
                if not self._open:
                    self._thread = None
                    return
                errand = self._open[0]
            done = self._tried(errand)
            with self._lock:
                self._counts[f"checkpoint/{errand.kind}{'' if done else '_failed'}"] += 1
                self._open.remove(errand)
                self._lock.notify_all()

    def _tried(self, errand: Errand) -> bool:
        for number in range(1, TRIES + 1):
            why = run_beside(errand.arguments, self._within_s, "learner.save_timeout_s")
            if not why:
                log.info("%s is done", errand.what)
                return True
            log.error("%s failed (try %d of %d), training goes on: %s", errand.what, number, TRIES, why)
            if number < TRIES:
                self._sleep(PAUSE_S * number)
        return False


def run_beside(arguments: Sequence[str], within_s: float, of: str = "a fixed limit") -> str:
    """Run Python with `arguments`, at low priority. Returns the reason for a failure, as one line; empty on success.

    Args:
        of: the setting that `within_s` comes from, for the message.
    """
    # Bound to this process: nobody else would end one that hangs, and the next learner starts its own.
    command = ["nice", "-n", str(NICE), *dying_with_this([sys.executable, *arguments])]
    # Without the launcher's variables, with which a process would take itself for one of its ranks.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(RANK_OF_TORCHRUN)}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # the learner's GPU memory is planned without it
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=within_s, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return f"it took longer than {within_s:g} s ({of})"
    except OSError as error:
        return str(error)
    said = ended.stderr.strip().splitlines()
    return "" if ended.returncode == 0 else (said[-1][:500] if said else f"exit code {ended.returncode}")
