"""The run folder: whose it is, and what an earlier run left there.

    runs/<run.name>/  run.json  config.yaml  metrics.jsonl  samples.jsonl  logs/  ckpt/  hf/  curves.png

`run.json` holds the id of the run. All processes of one run carry the same id, so the first one prepares the folder
and the others find it prepared.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
from pathlib import Path
from typing import Any

from asyncrl.config import Config, config_to_dict, to_yaml
from asyncrl.errors import RunFolderError

RUN_FILE = "run.json"
SECRET_NAMES = ("*key*", "*token*", "*secret*", "*password*")


def prepare_run_folder(config: Config, run_id: str) -> Path:
    """Make `run.dir` ready for the run `run_id` and return it. Idempotent for the same id.

    Raises:
        RunFolderError: another run used the folder and neither `resume` nor `overwrite` is set, or the folder holds
            something that no run left there.
    """
    folder = Path(config.run.dir).resolve()
    owner = owner_of(folder)
    if owner == run_id:
        return folder
    used = folder.is_dir() and any(folder.iterdir())
    if used and owner is None:
        raise RunFolderError(
            f"run.dir={config.run.dir} holds files but no {RUN_FILE}, so it is no run folder of asyncrl and is left "
            "alone. Give another run.dir or run.name"
        )
    if used and config.overwrite:
        shutil.rmtree(folder)
    elif used and config.resume == "never":
        raise RunFolderError(
            f"run.dir={config.run.dir} was used by an earlier run. Continue it with resume=auto, delete it with "
            "overwrite=true, or give another run.name"
        )
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / RUN_FILE).write_text(json.dumps({"run_id": run_id}) + "\n")
    write_config(config, folder)
    return folder


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
