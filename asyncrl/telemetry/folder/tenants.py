"""Who may be in a run folder: one run at a time, and one learner of it, for as long as their processes live."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.config import LOG_DIR
from asyncrl.errors import RunFolderError
from asyncrl.schema import RunSettings
from asyncrl.storage.full_disk import disk_space
from asyncrl.storage.occupancy import alone_in, held_alone, holders
from asyncrl.telemetry.folder.run_folder import LEARNER_FILE, owner_of, refuse_used_folder, written
from asyncrl.utils.process_tree import is_stopped
from asyncrl.utils.stopped_processes import who


@contextmanager
def occupied(config: RunSettings) -> Iterator[None]:
    """Hold `run.dir` for the caller's run. It stays held while any process of the run lives (`lived_in`): a second run
    in it on this machine would write into the files of the first, or delete them.

    Raises:
        RunFolderError: another run is in progress in it, or it cannot be made.
    """
    folder = Path(config.run.dir).resolve()
    if folder.exists() and not folder.is_dir():
        refuse_used_folder(config)
    with written(config):
        folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder) as alone:
        if not alone:
            raise RunFolderError(
                f"run.dir={config.run.dir} belongs to a run that is in progress{holders(folder)}. Stop it first, or "
                "give another run.name"
            )
        yield


@contextmanager
def sole_learner(config: RunSettings) -> Iterator[None]:
    """Hold `run.dir` for this learner, before it changes anything there. Called by rank 0, which holds it until the
    context or its process ends.

    Raises:
        RunFolderError: another learner of this machine holds it, or the folder is no run folder or cannot be written.
    """
    folder = Path(config.run.dir).resolve()
    if owner_of(folder) is None:
        refuse_used_folder(config)
    file = folder / LOG_DIR / LEARNER_FILE
    with written(config):
        file.parent.mkdir(parents=True, exist_ok=True)
        with disk_space(file, 1):
            file.touch()
    with held_alone(file) as other:
        if other is not None:
            paused = f" (after `kill -CONT {other.pid}`: it is stopped)" if is_stopped(other) else ""
            raise RunFolderError(
                f"run.dir={config.run.dir} has a learner that is alive: {who(other)}, pid {other.pid}. Start one "
                f"learner at a time: `kill -INT {other.pid}` makes it save a checkpoint and end{paused}, and then "
                "resume=auto continues from there. Or give another run.name"
            )
        yield
