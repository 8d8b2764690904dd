"""The run folder: whose it is, and what an earlier run left there.

    runs/<run.name>/  run.json  config.yaml  metrics.jsonl  samples.jsonl  ledger.jsonl  curves.png
                      journal/  logs/  ckpt/  hf/

`run.json` holds the id of the run. All processes of one run carry the same id, so the first one prepares the folder
and the others find it prepared.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
from pathlib import Path
from typing import Any

from asyncrl.config import JOURNAL_DIR, config_to_dict, to_yaml
from asyncrl.errors import RunFolderError
from asyncrl.schema import Config

RUN_FILE = "run.json"
LOG_DIR = "logs"
SECRET_NAMES = ("*key*", "*token*", "*secret*", "*password*")


def prepare_run_folder(config: Config, run_id: str, *, keep: tuple[str, ...] = ()) -> Path:
    """Make `run.dir` ready for the run `run_id` and return it. Idempotent for the same id. `overwrite` spares `keep`,
    the names of what other processes of the new run may have begun.

    Raises:
        RunFolderError: another run used the folder and neither `resume` nor `overwrite` is set, or the folder holds
            something that no run left there.
    """
    folder = Path(config.run.dir).resolve()
    if owner_of(folder) == run_id:
        return folder
    refuse_used_folder(config)
    if config.overwrite and owner_of(folder) is not None:
        for entry in folder.iterdir():
            if entry.name not in keep:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    (folder / LOG_DIR).mkdir(parents=True, exist_ok=True)
    (folder / RUN_FILE).write_text(json.dumps({"run_id": run_id}) + "\n")
    write_config(config, folder)
    return folder


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
