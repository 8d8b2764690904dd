"""The run folder: whose it is, and what an earlier run left there.

    runs/<run.name>/  run.json  config.yaml  metrics.jsonl  samples.jsonl  ledger.jsonl  curves.png
                      journal/  logs/  ckpt/  hf/

`run.json` holds the id of the run. All processes of one run carry the same id, so the first one prepares the folder
and the others find it prepared.
"""

from __future__ import annotations

import fcntl
import fnmatch
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl.config import JOURNAL_DIR, config_to_dict, to_yaml
from asyncrl.errors import RunFolderError
from asyncrl.schema import Config

log = logging.getLogger(__name__)

RUN_FILE = "run.json"
LOG_DIR = "logs"
SECRET_NAMES = ("*key*", "*token*", "*secret*", "*password*")


def prepare_run_folder(config: Config, run_id: str, *, keep: tuple[str, ...] = ()) -> Path:
    """Make `run.dir` ready for the run `run_id` and return it. Idempotent for the same id. `overwrite` spares `keep`,
    the names of what other processes of the new run may have begun.

    Raises:
        RunFolderError: another run used the folder and neither `resume` nor `overwrite` is set, or the folder holds
            something that no run left there, or it cannot be written.
    """
    folder = Path(config.run.dir).resolve()
    if owner_of(folder) == run_id:
        return folder
    refuse_used_folder(config)
    with _writing(config):
        _prepare(config, folder, run_id, keep)
    return folder


def _prepare(config: Config, folder: Path, run_id: str, keep: tuple[str, ...]) -> None:
    if config.overwrite and owner_of(folder) is not None:
        for entry in folder.iterdir():
            if entry.name not in keep:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    (folder / LOG_DIR).mkdir(parents=True, exist_ok=True)
    # Not in place: half written on a full disk, it would make a folder of nobody's, which is never touched again.
    aside = folder / LOG_DIR / RUN_FILE
    aside.write_text(json.dumps({"run_id": run_id}) + "\n")
    aside.replace(folder / RUN_FILE)
    write_config(config, folder)


@contextmanager
def occupied(config: Config) -> Iterator[None]:
    """`run.dir` belongs to the caller for as long as this lasts: a second run in it on this machine would write into
    the files of the first, or delete them.

    Raises:
        RunFolderError: another run is going on in it, or it cannot be made.
    """
    folder = Path(config.run.dir).resolve()
    if folder.exists() and not folder.is_dir():
        refuse_used_folder(config)
    with _writing(config):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(
                f"run.dir={config.run.dir} belongs to a run that is going on right now. Stop that one first, or give "
                "another run.name"
            ) from None
        except OSError as error:  # a file system that has no such locks
            log.debug("%s cannot be locked: %s", folder, error)
        yield
    finally:
        os.close(handle)  # gives the lock back, and so does the end of this process, however it comes


@contextmanager
def _writing(config: Config) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"run.dir={config.run.dir} cannot be written: {error.strerror or error}. Free space there, or give another "
            "run.dir"
        ) from error


def refuse_used_folder(config: Config) -> None:
    """Raises RunFolderError as `prepare_run_folder` does for a new run; changes nothing."""
    folder = Path(config.run.dir).resolve()
    # A rollout pool that was started before the learner has opened its logs already, a replay server its journal.
    early = (LOG_DIR, JOURNAL_DIR)
    if not folder.exists() or (folder.is_dir() and all(entry.name in early for entry in folder.iterdir())):
        return
    if not folder.is_dir():
        raise RunFolderError(f"run.dir={config.run.dir} is a file. Give another run.dir or run.name")
    if owner_of(folder) is None:
        raise RunFolderError(
            f"run.dir={config.run.dir} holds files but no {RUN_FILE}, so it is no run folder of asyncrl and is left "
            "alone. Give another run.dir or run.name"
        )
    if config.resume == "never" and not config.overwrite:
        raise RunFolderError(
            f"run.dir={config.run.dir} was used by an earlier run. Continue it with resume=auto, delete it with "
            "overwrite=true, or give another run.name"
        )


def owner_of(folder: Path) -> str | None:
    """Id of the run that prepared the folder, or None where no run did."""
    try:
        return str(json.loads((folder / RUN_FILE).read_text())["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_config(config: Config, folder: Path) -> None:
    """`config.yaml`: every setting as it was resolved, secrets blotted out."""
    (folder / "config.yaml").write_text(to_yaml(redacted(config_to_dict(config))))


def redacted(settings: dict[str, Any]) -> dict[str, Any]:
    """A copy in which no text stands under a name like key, token, secret or password. Numbers stay: max_new_tokens."""
    shown: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            shown[name] = redacted(value)
        elif isinstance(value, str) and value and any(fnmatch.fnmatch(name.lower(), secret) for secret in SECRET_NAMES):
            shown[name] = "***"
        else:
            shown[name] = value
    return shown
