"""Lets the learner save a checkpoint before a run ends, and says meanwhile what the end waits for.

consumes:     rows of metrics.jsonl; the learner's log
waits for:    the learner's step and its checkpoint, `SAVE_S` at most
unblocked by: the learner's end, the failure of another role, a second signal
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from asyncrl.cli.processes.ending import named_steps
from asyncrl.cli.processes.supervisor import Supervisor
from asyncrl.config import LOG_DIR
from asyncrl.errors import CheckpointError
from asyncrl.storage.checkpoints import chosen, trained_steps
from asyncrl.storage.full_disk import BOARD_FILE, read_board
from asyncrl.telemetry.folder.run_folder import STOP_FILE
from asyncrl.telemetry.live.console import say
from asyncrl.telemetry.live.progress import RunView
from asyncrl.telemetry.live.tails import SAVING, LogLines

TURN_S = 0.2
SAVE_S = 600.0
"""Seconds that the learner has to end its step and save a checkpoint."""
SAY_S = 10.0
"""Seconds between two lines about what is waited for."""
KILL_S = 20.0
"""Seconds after a SIGTERM at which the steps are named that a kill would lose: Slurm and Kubernetes kill after 30 s."""


class Notices:
    """Shows the roles' notices of a full disk, which they cannot write to their logs."""

    def __init__(self, log_dir: Path, console: Console) -> None:
        self._board, self._console = log_dir / BOARD_FILE, console
        self._shown = read_board(self._board)

    def show(self) -> None:
        """Print a new notice."""
        text = read_board(self._board)
        if text != self._shown:
            self._shown = text
            say(self._console, text)


def watch(supervisor: Supervisor, view: RunView, notices: Notices) -> None:
    notices.show()
    for said in supervisor.observe():
        view.say(said)


def reason_to_save(supervisor: Supervisor) -> str:
    """Why the learner should save and end before the others are stopped; empty if it cannot or need not."""
    if supervisor.signal:
        return signal.Signals(supervisor.signal).name
    failed = [role.name for role in supervisor.failed()]
    # A checkpoint holds what the replay server knows of the run, so without a server there is none.
    return "" if not failed or "replay" in failed or "learner" in failed else f"{' and '.join(failed)} failed"


def save_first(supervisor: Supervisor, folder: Path, view: RunView, notices: Notices, why: str) -> bool:
    """Have the learner save a checkpoint and end. Returns whether it did.

    Args:
        why: begins each line that is shown, such as the name of a signal.
    """
    learner, gone = supervisor.roles["learner"], {role.name for role in supervisor.failed()}
    view.say(f"{why}: the learner ends its step and saves a checkpoint. Press Ctrl-C again to end the run at once")
    wait = _Wait(folder, view, why)
    try:
        (folder / LOG_DIR / STOP_FILE).touch()
    except OSError as error:
        view.say(f"the learner cannot be asked for a checkpoint: {error}")
        return False
    while learner.code is None and not supervisor.impatient and wait.seconds() < SAVE_S:
        if any(role.name not in gone for role in supervisor.failed()):
            break
        watch(supervisor, view, notices)
        wait.look(killed_soon=supervisor.signal == signal.SIGTERM)
        view.refresh("saving a checkpoint")
        time.sleep(TURN_S)
    return learner.code == 0


class _Wait:
    """What is waited for, and what would be lost meanwhile."""

    def __init__(self, folder: Path, view: RunView, why: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._view, self._why, self._clock = folder, view, why, clock
        self._began = self._said = clock()
        self._log = LogLines(folder / LOG_DIR)
        self._saving = self._warned = False

    def seconds(self) -> float:
        return self._clock() - self._began

    def look(self, *, killed_soon: bool) -> None:
        self._saving = self._saving or any(SAVING in line for _, line in self._log.new("learner.log"))
        if killed_soon and not self._warned and self.seconds() >= KILL_S:
            self._warned = True
            self._view.say(self._lost())
        elif self._clock() - self._said >= SAY_S:
            self._view.say(f"{self._why}: waiting for the learner for {self.seconds():.0f} s; {self._doing()}")
        else:
            return
        self._said = self._clock()

    def _doing(self) -> str:
        step = self._view.last_step
        if self._saving:
            return f"it saves the checkpoint of step {step}"
        last_s = self._view.last_step_s
        return f"it ends step {step + 1}{f' (the last step took {last_s:.0f} s)' if last_s else ''}"

    def _lost(self) -> str:
        step = self._view.last_step
        try:
            saved = trained_steps(chosen(self._folder, "auto"))
        except CheckpointError as error:
            return f"{self._why}: after {self.seconds():.0f} s nothing is saved: {error}"
        unsaved = named_steps(saved, max(step, saved + 1))
        return (
            f"{self._why}: after {self.seconds():.0f} s {unsaved} not saved, because {self._doing()}. If the run is "
            f"killed now (Slurm and Kubernetes do so after 30 s, unless told otherwise: --signal=B:TERM@600, "
            f"terminationGracePeriodSeconds: 600), it continues from {f'step {saved}' if saved else 'the start'}"
        )
