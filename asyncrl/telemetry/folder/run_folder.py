"""The run folder: which run it belongs to, and what an earlier run left there.

    runs/<run.name>/  run.json  config.yaml  metrics.jsonl  samples.jsonl  eval_samples.jsonl  ledger.jsonl  curves.png
                      journal/  keys/  logs/  ckpt/  hf/

`run.json` contains two ids. `run_id` is the id of the newest start: all its processes have it, so that the first one
prepares the folder and the others find it prepared. `origin` is the id of the first start, which every resume keeps and
checkpoints contain.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.checks.dtypes import AUTO
from asyncrl.checks.user_code import code_hashes
from asyncrl.config import JOURNAL_DIR, KEYS_DIR, LOG_DIR, config_to_dict, settings_as_used, to_yaml
from asyncrl.errors import AsyncRLError, RunFolderError
from asyncrl.schema import Config, RunSettings
from asyncrl.storage.checkpoints import CHECKPOINT_DIR, FORKED_FROM, RUN_FILE, forked_from, is_of_another_run
from asyncrl.storage.full_disk import BOARD_BYTES, BOARD_FILE, disk_space, make_board
from asyncrl.storage.objects import read_object
from asyncrl.storage.sealed import replace_text
from asyncrl.telemetry.folder.origins import commented, origins
from asyncrl.telemetry.folder.resumed import (
    CONFIG_FILE,
    changed_code,
    changes_of_resume,
    code_noted,
    history_of,
    made_of,
    refuse_other_run,
    resumed_lines,
)

log = logging.getLogger(__name__)

BLOTTED = "***"
METRICS_FILE = "metrics.jsonl"
STOP_FILE = "stop"
"""In `logs`: asks the learner to save a checkpoint and end."""
LEARNER_FILE = "learner.lock"
"""In `logs`: locked by rank 0 of the learner, for as long as it lives."""
SEAL = "# The lines above have the xxh3 "
"""Begins the last line of `config.yaml`; a hash follows. A resume compares its settings with this file."""
SECRET_NAMES = ("*key*", "*token*", "*secret*", "*password*")


def prepare_run_folder(
    config: RunSettings,
    run_id: str,
    *,
    keep: tuple[str, ...] = (),
    overrides: Sequence[str] | None = None,
    begins: Path | None = None,
) -> Path:
    """Prepare `run.dir` for the run `run_id` and return it. Idempotent for the same id.

    Args:
        keep: names that `overwrite` does not delete, since other processes of the new run may have made them.
        overrides: those that `config` was loaded with; they give the origin of each value in `config.yaml`.
        begins: the checkpoint from which a resume continues, if it is known; otherwise it is looked up.

    Raises:
        RunFolderError: another run used the folder and neither `resume` nor `overwrite` is set, or the folder holds
            something that no run left there, or it cannot be written.
    """
    folder = Path(config.run.dir).resolve()
    if owner_of(folder) == run_id:
        return folder
    refuse_used_folder(config)
    changed = resumed_lines(config, folder, changes_in(config), begins)
    with written(config):
        _prepare(config, folder, run_id, keep, changed, overrides)
    return folder


def changes_in(config: RunSettings, settled: RunSettings | None = None) -> list[str]:
    """Return `key: old -> new` for what resuming with `config` would change in the run in `run.dir`; changes nothing.

    Args:
        settled: `config` with `auto` resolved, for a rank that torchrun restarts: it keeps what the run began with.

    Raises:
        RunFolderError: what no resume may change; see `asyncrl.telemetry.folder.resumed`.
    """
    changes = _changes(config)
    if settled is None or not changes:
        return changes
    given = {change.partition(":")[0] for change in changes}
    return [change for change in _changes(settled) if change.partition(":")[0] in given]


def _changes(config: RunSettings) -> list[str]:
    folder = Path(config.run.dir).resolve()
    if config.overwrite or owner_of(folder) is None:
        return []
    refuse_other_run(config, folder)
    usual = config_to_dict(type(config)())
    changed = changes_of_resume(redacted(settings_as_used(config)), folder, usual)
    return changed + changed_code(config, folder) if isinstance(config, Config) else changed


def _prepare(
    config: RunSettings,
    folder: Path,
    run_id: str,
    keep: tuple[str, ...],
    changed: list[str],
    overrides: Sequence[str] | None,
) -> None:
    origin = run_id if config.overwrite else origin_of(folder) or run_id
    if config.overwrite and owner_of(folder) is not None:
        for entry in folder.iterdir():
            if entry.name not in keep:
                _remove(entry)
    (folder / LOG_DIR).mkdir(parents=True, exist_ok=True)
    (folder / LOG_DIR / STOP_FILE).unlink(missing_ok=True)
    board = folder / LOG_DIR / BOARD_FILE
    with disk_space(board, BOARD_BYTES):
        make_board(board)
    code = code_noted(folder) or _code_of(config)
    begins = {"auto": forked_from(folder), "never": ""}.get(config.resume, config.resume)
    values = {"run_id": run_id, "origin": origin, "made_of": made_of(config), "code": code}
    _note(config, folder, values | ({FORKED_FROM: begins} if begins else {}))
    # In `logs` for a run that continues: a start that is refused before a step was no resume (`begin_settings`).
    target = folder / LOG_DIR if (folder / CONFIG_FILE).exists() else folder
    write_config(config, target, [*history_of(folder), *changed], overrides)


def _remove(entry: Path) -> None:
    if not entry.is_dir() or entry.is_symlink():
        entry.unlink()
    elif entry.name == LOG_DIR:  # a lock on a file that is gone keeps nobody away
        for log_file in entry.iterdir():
            if log_file.name != LEARNER_FILE:
                _remove(log_file)
    else:
        shutil.rmtree(entry)


def note_steps(config: RunSettings, steps: int) -> None:
    """Note the number of steps of the whole run, if the settings give only epochs."""
    folder = Path(config.run.dir).resolve()
    _note(config, folder, read_object(folder / RUN_FILE) | {"steps": steps})


def steps_noted(folder: Path) -> int:
    """Return the number of steps that was noted; 0 if none was."""
    found = _run_file(folder).get("steps", "")
    return int(found) if found.isdecimal() else 0


def _code_of(config: RunSettings) -> dict[str, str]:
    return code_hashes(config) if isinstance(config, Config) else {}


def _note(config: RunSettings, folder: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values) + "\n"
    # Written in `logs` first: a half-written file would make the folder one of no run, which is never touched again.
    file, aside = folder / RUN_FILE, folder / LOG_DIR / RUN_FILE
    with disk_space(file, len(text)):
        replace_text(file, text, aside)


@contextmanager
def written(config: RunSettings) -> Iterator[None]:
    """Replace an OSError of the block: `run.dir` cannot be written. Raises RunFolderError."""
    try:
        yield
    except AsyncRLError:
        raise
    except OSError as error:
        raise RunFolderError(
            f"run.dir={config.run.dir} cannot be written: {error.strerror or error}. Free space there, or give another "
            "run.dir"
        ) from error


def refuse_used_folder(config: RunSettings) -> None:
    """Raise RunFolderError as `prepare_run_folder` would for a new run; changes nothing."""
    folder = Path(config.run.dir).resolve()
    # A rollout pool that started before the learner has already made logs and keys, and a replay server its journal.
    early = (LOG_DIR, JOURNAL_DIR, KEYS_DIR)
    if not folder.exists() or (folder.is_dir() and all(entry.name in early for entry in folder.iterdir())):
        return
    if not folder.is_dir():
        raise RunFolderError(f"run.dir={config.run.dir} is a file. Give another run.dir or run.name")
    if owner_of(folder) is None and (folder / RUN_FILE).exists():
        raise RunFolderError(
            f"{folder / RUN_FILE} cannot be read. It says which run the folder belongs to, so the folder is not "
            "touched. Restore the file from a copy, or give another run.dir or run.name"
        )
    if owner_of(folder) is None:
        raise RunFolderError(
            f"run.dir={config.run.dir} holds files but no {RUN_FILE}, so it is not a run folder of asyncrl and is not "
            "touched. Give another run.dir or run.name"
        )
    if config.resume == "never" and not config.overwrite:
        raise RunFolderError(
            f"run.dir={config.run.dir} was used by an earlier run. Continue it with resume=auto, delete it with "
            "overwrite=true, or give another run.name"
        )
    named = Path(config.resume) if config.resume not in ("never", "auto") else None
    if named and _has_rows(folder) and is_of_another_run(named, folder / CHECKPOINT_DIR, origin_of(folder)):
        raise RunFolderError(
            f"run.dir={config.run.dir} already has steps of its own, and resume={config.resume} is a checkpoint of "
            "another run. The rows and groups of both runs would be mixed up. Give another run.dir to continue from "
            "that checkpoint"
        )


def _has_rows(folder: Path) -> bool:
    try:
        return (folder / METRICS_FILE).stat().st_size > 0
    except OSError:
        return False


def owner_of(folder: Path) -> str | None:
    """Return the id of the start that prepared the folder, or None if none did."""
    return _run_file(folder).get("run_id")


@contextmanager
def still_of(run_id: str, folder: Path) -> Iterator[None]:
    """Replace errors of a process of the run `run_id` if its folder was taken away: a restarted process would make a
    new folder in its place, with keys that no other process knows.

    Raises:
        RunFolderError: in place of any error, if the folder no longer belongs to the run.
    """
    try:
        yield
    except (OSError, AsyncRLError) as error:
        if gone := said_of_gone(run_id, folder):
            raise RunFolderError(gone) from error
        raise


def said_of_gone(run_id: str, folder: Path) -> str:
    """Return a message if `folder` no longer belongs to the run `run_id`; empty if it does."""
    found = _run_file(folder)
    if (owner := found.get("run_id")) == run_id:
        return ""
    if owner and found.get("origin", owner) != owner:  # a resume keeps it
        return (
            f"run.dir={folder}: a later start with resume has taken this run over and continues it from its newest "
            "checkpoint. Start one learner at a time"
        )
    return (
        f"run.dir={folder} was moved, deleted or recreated during the run. If it was moved, move it back completely "
        "and continue with resume=auto"
    )


def origin_of(folder: Path) -> str:
    """Return the id of the run in the folder, which its resumes keep; empty if there is none."""
    found = _run_file(folder)
    return found.get("origin") or found.get("run_id", "")


def _run_file(folder: Path) -> dict[str, str]:
    try:
        return {name: str(value) for name, value in read_object(folder / RUN_FILE).items()}
    except (OSError, ValueError):
        return {}


def write_config(
    config: RunSettings, folder: Path, history: Sequence[str] = (), overrides: Sequence[str] | None = None
) -> None:
    """Write `config.yaml`: what resumes have changed, then every resolved setting, without secrets, and with the origin
    of its value if `overrides` are given."""
    settings = to_yaml(redacted(settings_as_used(config)))
    if overrides is not None:
        preset = config.loss.preset if isinstance(config, Config) else None
        settings = commented(settings, origins(overrides, preset, type(config)))
    _put_config(config, folder / CONFIG_FILE, "".join(f"{line}\n" for line in history) + settings)


def begin_settings(config: RunSettings, found: Mapping[str, str]) -> None:
    """Make `config` the content of `config.yaml`; the learner calls this when it begins with a checkpoint that fits.

    `auto` is replaced by what it was resolved to, so that a resume, `asyncrl export` and `asyncrl rerun` use the same
    on any machine.

    Args:
        found: setting, such as `model.dtype` -> resolved dtype.
    """
    folder = Path(config.run.dir).resolve()
    path = folder / CONFIG_FILE
    with suppress(FileNotFoundError):
        (folder / LOG_DIR / CONFIG_FILE).replace(path)
    _note(config, folder, read_object(folder / RUN_FILE) | {"code": _code_of(config)})
    before = after = path.read_text().rpartition(SEAL)[0] if path.exists() else ""
    for key, dtype in found.items():
        room, _, name = key.partition(".")
        after = re.sub(rf"(?m)^({room}:.*\n(?: .*\n)*?  {name}: ){AUTO}\b", rf"\g<1>{dtype}", after)
    if after != before:
        _put_config(config, path, after)


def _put_config(config: RunSettings, path: Path, text: str) -> None:
    text += _seal_of(text)
    with disk_space(path, len(text.encode())):
        replace_text(path, text, path.with_suffix(".tmp"))


def config_note(folder: Path) -> str:
    """Return a message if `config.yaml` is not as the run wrote it, else empty. A resume compares with it."""
    path = folder / CONFIG_FILE
    try:
        text, _, seal = path.read_text().rpartition(SEAL)
    except (OSError, ValueError) as error:
        return f"{path} cannot be read ({error}), so it is not known what a resume changes"
    if f"{SEAL}{seal}" == _seal_of(text):
        return ""
    return f"{path} was changed or truncated after the run wrote it. Its present content is used"


def _seal_of(text: str) -> str:
    return f"{SEAL}{xxhash.xxh3_64(text.encode()).hexdigest()}\n"


def redacted(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a copy without texts under names such as key, token, secret or password, at any depth. Numbers stay
    (max_new_tokens)."""
    return {name: _blotted(value, _is_secret(name)) for name, value in settings.items()}


def _blotted(value: Any, secret: bool) -> Any:
    if isinstance(value, dict):
        return {name: _blotted(part, secret or _is_secret(name)) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_blotted(part, secret) for part in value]
    return BLOTTED if secret and isinstance(value, str) and value else value


def _is_secret(name: Any) -> bool:
    lower = str(name).lower()
    # `key_env` is the name of the variable with the key; without it a run could not be repeated.
    return not lower.endswith("_env") and any(fnmatch.fnmatch(lower, secret) for secret in SECRET_NAMES)


def without_blots(value: Any, *, secret: bool = False) -> Any:
    """Return the settings of a `config.yaml` without the values that `redacted` replaced."""
    if isinstance(value, dict):
        kept = {name: without_blots(part, secret=secret or _is_secret(name)) for name, part in value.items()}
        return {name: part for name, part in kept.items() if part is not None or value[name] is None}
    if isinstance(value, list):
        kept = [without_blots(part, secret=secret) for part in value]
        return None if None in kept and None not in value else kept
    return None if secret and value == BLOTTED else value
