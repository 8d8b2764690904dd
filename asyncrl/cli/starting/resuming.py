"""Determines whether a run has anything left to do, and from which checkpoint it resumes."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from asyncrl.collector import load
from asyncrl.errors import CheckpointError
from asyncrl.schema import Config
from asyncrl.storage.checkpoints import EXPORT_DIR, chosen, proven, trained_in, trained_steps
from asyncrl.telemetry.folder.run_folder import owner_of
from asyncrl.telemetry.reports.summary import without


def nothing_to_do(folder: Path, trained: str, typed: Sequence[str], longer: str) -> str:
    """Return the message of a run that is `trained`; `longer` is the setting with which it goes on."""
    kept = without(typed, ("learner.steps", "learner.epochs", "resume", "overwrite"))
    more = shlex.join([*kept, longer, "resume=auto"])
    return f"nothing to do: {trained}. The model is in {folder / EXPORT_DIR}. To train on:\n  {more}"


def trained_whole(config: Config, folder: Path) -> int:
    """Return the steps of a run that has finished and exported its model; 0 for any other."""
    with suppress(CheckpointError):  # reported at the start
        resumed = trained_steps(chosen(folder, config.resume))
        if resumed >= config.learner.steps and trained_in(folder / EXPORT_DIR) == resumed:
            return resumed
    return 0


def check_resumed(config: Config, say: Callable[[str], None]) -> Path | None:
    """Check the run and its checkpoint: damage found only when a rank restores would use up all restarts of torchrun.

    Returns:
        The checkpoint from which the run resumes, which is complete.

    Raises:
        RunFolderError: the run to be resumed is damaged, or its files contradict each other.
        CheckpointDamagedError: the checkpoint that `resume` names is damaged.
    """
    if config.resume == "never":
        return None
    newest, folder = None, Path(config.run.dir).resolve()
    if owner_of(folder) is not None:
        newest = load("asyncrl.cli.starting.folder_check").refuse_damaged(folder, config.resume, say)
    return newest if newest and config.resume == "auto" else proven(folder, config.resume, say)
