"""What a resume may change in a run, and what it may not.

may        any setting but those below: each change is said in one line and kept at the head of `config.yaml`
may not    what the run is made of: the model it began with, the rows of its data and their order (`seed`,
           `data.shuffle`); by content, so that a folder that was moved is the same one; and its kind

run.json   {"run_id": ..., "made_of": {"model": fingerprint, "data": fingerprint, "seed": 0, "data.shuffle": true},
            "code": {"reward.function": fingerprint, ...}, "forked_from": "runs/OLD/ckpt/step_50"}
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml

from asyncrl.checks.dtypes import AUTO, DTYPES, KEYS
from asyncrl.checks.sources import Place, Source, places, sources
from asyncrl.checks.user_code import code_hashes, user_code
from asyncrl.config import by_key, config_to_dict, meant
from asyncrl.errors import ConfigError, DataError, RunFolderError
from asyncrl.schema import Config, RunSettings
from asyncrl.storage.checkpoints import CHECKPOINT_DIR, RUN_FILE, proven
from asyncrl.storage.objects import read_object
from asyncrl.telemetry.folder.origins import FromFile

Settings = TypeVar("Settings", bound=RunSettings)
CONFIG_FILE = "config.yaml"
ROWS = "rows"
"""Name under which the learner announces the `rows_here` of its machine."""
RESUMED = "# resumed "
SUPERVISED = "supervised"
"""Kind of a run of `asyncrl sft`; one of reinforcement learning has none."""
OF_A_START = (
    *("resume", "overwrite", "run.dir", "run.name", "replay.address", "replay.keys"),
    *("ray.address", "ray.gpus_per_worker", "placement.mode", "placement.gpus"),
    *("weights.backend", "weights.port", "weights.interface"),
)
"""Settings that belong to one start of a run, not to the run."""
MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")
SAVED_FILES = (".json", ".arrow")
PIECE = 1 << 20
"""Bytes read at either end of a file. They and the size identify a file, so that a large model need not be read."""


def settings_file(run: Path) -> Path:
    """Return the file with the settings of a run. Raises RunFolderError: `run` is not the folder of one."""
    file = run / CONFIG_FILE
    if not file.is_file():
        raise RunFolderError(f"{run} is not a run folder: it has no {CONFIG_FILE}. Give a folder such as runs/NAME")
    return file


def made_of(config: RunSettings) -> dict[str, Any]:
    """Return what no resume may change, as JSON values by name."""
    kind = {} if isinstance(config, Config) else {"kind": SUPERVISED}
    return {
        **kind,
        "model": fingerprint(config.model.path),
        "data": data_fingerprint(config),
        "seed": config.seed,
        "data.shuffle": config.data.shuffle,
        "data.order_by": config.data.order_by,
    }


def data_fingerprint(config: RunSettings) -> str:
    """Return the fingerprint of the data. For a single file, it is that of the file; otherwise 16 hex digits over the
    rows of all sources, their weights, and the settings that choose among the rows."""
    found = sources(config.data)
    described = [
        {
            "rows": _rows(source),
            "mixed": [source.name, source.weight] if source.name else [],
            "chosen": [source.prompt_column, *map(str, source.where)],
            "args": source.args if source.runs_user_code else {},
        }
        for source in found
    ]
    first = described[0]
    plain = len(found) == 1 and not first["mixed"] and first["chosen"] == ["prompt"] and not first["args"]
    if plain and len(first["rows"]) == 1:
        return first["rows"][0]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def rows_here(config: Config) -> str:
    """Return `data_fingerprint`; empty if some of the data is not on this machine."""
    try:
        for source in sources(config.data):
            places(source)
    except (ConfigError, DataError):
        return ""
    return data_fingerprint(config)


def _rows(source: Source) -> list[str]:
    """Return the fingerprint of each file of a source. A path that is not on this machine, but perhaps on the
    learner's, stands for itself."""
    try:
        return [_of_place(place) for place in places(source)]
    except DataError:
        return list(source.specs)


def _of_place(place: Place) -> str:
    if place.kind == "custom":
        return fingerprint(place.path.rpartition(":")[0]) + place.path.rpartition(":")[2]
    return place.path if place.kind == "hub" else fingerprint(place.path, SAVED_FILES)


def fingerprint(path: str, endings: Sequence[str] = MODEL_FILES) -> str:
    """Return 16 hex digits for a file, or for the files with these endings in a folder. A hub name is returned."""
    place = Path(path)
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.is_file() and file.suffix in endings)
    elif place.is_file():
        files = [place]
    else:
        return path
    digest = hashlib.sha256()
    for file in files:
        name, size = file.name if place.is_dir() else "", file.stat().st_size
        digest.update(f"{name}/{size}/".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(PIECE))
            if size > PIECE:
                opened.seek(max(PIECE, size - PIECE), os.SEEK_SET)
                digest.update(opened.read(PIECE))
    return digest.hexdigest()[:16]


def _noted(folder: Path, what: str) -> dict[str, Any]:
    """Read an entry of `run.json`; empty if an older version wrote the file. Raises OSError, ValueError."""
    found = read_object(folder / RUN_FILE).get(what, {})
    if not isinstance(found, dict):
        raise ValueError(f"{what} is not a JSON object")
    return found


def is_supervised(folder: Path) -> bool:
    """Return whether `folder` belongs to a run of `asyncrl sft`. If `run.json` is gone, the settings decide."""
    with suppress(OSError, ValueError):
        return _noted(folder, "made_of").get("kind") == SUPERVISED
    with suppress(OSError, ValueError):
        return "\n  rows_per_step: " in (folder / CONFIG_FILE).read_text()
    return False


def refuse_other_run(config: RunSettings, folder: Path) -> None:
    """Raise RunFolderError if `folder` belongs to a run with another model, other data or of another kind."""
    try:
        known = _noted(folder, "made_of")
    except (OSError, ValueError):
        return  # no run, or one of an older version: there is nothing to compare
    given = made_of(config)
    if known.get("kind") != given.get("kind"):
        of = "asyncrl sft" if known.get("kind") else "reinforcement learning"
        raise RunFolderError(
            f"run.dir={config.run.dir} holds a run of {of}, which these settings cannot continue. Give another "
            f"run.name. The run's model is in {Path(config.run.dir) / 'hf'} once the run has ended"
        )
    named = {
        "model": f"model.path={config.model.path}",
        "data": "data.mixture" if config.data.mixture else f"data.path={config.data.path}",
    }
    for part, before in known.items():
        if part in given and given[part] != before:
            what = named.get(part, f"{part}={str(given[part]).lower()}")
            raise RunFolderError(
                f"{what} is not what the run in run.dir={config.run.dir} began with ({part} {str(before).lower()}). A "
                "resume may change how the model is trained, but not the model, the data and their order. Resume with "
                "the earlier value, or start a new run with another run.name"
            )


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any], usual: Mapping[str, Any]) -> list[str]:
    """Return `key: old -> new` for every setting of the run that differs, in the order of `after`.

    Args:
        usual: the defaults, which apply to a run from before a setting existed.
    """
    old, new = by_key(before, apart=True), by_key(after, apart=True)
    # A setting without a default belongs to some losses only: the change of the loss itself is reported.
    old = {key: value for key, value in by_key(usual, apart=True).items() if value is not None} | old
    return [
        f"{key}: {_said(old[key])} -> {_said(new[key])}"
        for key in new
        if key in old and old[key] != new[key] and key not in OF_A_START
    ]


def kept_dtypes(config: RunSettings, overrides: Sequence[str]) -> list[str]:
    """Return overrides that keep the dtypes that a run began with, for a resume that leaves them to `auto`."""
    path = Path(config.run.dir) / CONFIG_FILE
    if config.resume == "never" or config.overwrite or not path.exists():
        return []
    before, now = _settings_in(path), by_key(config_to_dict(config))
    old = by_key(before)
    typed = {text.partition("=")[0].lstrip("+") for text in overrides}
    left = [key for key in KEYS if now.get(key) == AUTO and key not in typed]
    kept = [f"{key}={old[key]}" for key in left if old.get(key) in DTYPES and old[key] != AUTO]
    return [FromFile.of(each, f"{CONFIG_FILE} of the run") for each in kept]


def load_as_begun(load: Callable[[Sequence[str]], Settings], overrides: Sequence[str]) -> tuple[Settings, list[str]]:
    """Load settings and return them with the overrides that they have then, see `kept_dtypes`. Raises ConfigError."""
    given = [*overrides, *kept_dtypes(load(overrides), overrides)]
    return load(given), given


def _said(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def changes_of_resume(settings: Mapping[str, Any], folder: Path, usual: Mapping[str, Any]) -> list[str]:
    """Return what a resume with `settings` changes in the run in `folder`, per its `config.yaml`; empty without one.

    Args:
        usual: see `changed_settings`.

    Raises:
        RunFolderError: `config.yaml` cannot be read.
    """
    path = folder / CONFIG_FILE
    return changed_settings(_settings_in(path), settings, usual) if path.exists() else []


def _settings_in(path: Path) -> dict[str, Any]:
    try:
        before = yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}. Repair or delete it, then resume again") from error
    if not isinstance(before, dict):
        raise RunFolderError(f"{path} contains no settings. Repair or delete it, then resume again")
    return meant(before)


def changed_code(config: Config, folder: Path) -> list[str]:
    """Return `the code of SETTING (SPEC): old -> new` for every file of the user that has changed since the run last
    used it, if the setting itself is the same."""
    before = code_noted(folder)
    now, named = code_hashes(config), user_code(config)
    return [
        f"the code of {key} ({named[key]}): {before[key]} -> {now[key]}"
        for key in now
        if key in before and before[key] != now[key]
    ]


def code_noted(folder: Path) -> dict[str, Any]:
    """Return setting -> hash of the user's file, as the run last used it; empty if that is not known."""
    try:
        return _noted(folder, "code")
    except (OSError, ValueError):
        return {}


def history_of(folder: Path) -> list[str]:
    """Return the lines at the head of `config.yaml` that say what resumes have changed."""
    path = folder / CONFIG_FILE
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith(RESUMED)]


def resumed_lines(config: RunSettings, folder: Path, changes: list[str], begins: Path | None = None) -> list[str]:
    """Return lines for the head of `config.yaml`: where the resume begins (at `begins` if given, else the checkpoint is
    looked up) and what it changes. Empty if nothing changes. Raises CheckpointDamagedError, RunFolderError."""
    named = config.resume not in ("auto", "never")
    if not changes and not named:
        return []
    start = begins or (proven(folder, config.resume, lambda _: None) if changes else Path(config.resume))
    start = start and start.resolve()
    here = start is None or start.parent == folder / CHECKPOINT_DIR
    begun = f"{RESUMED}from {(start.name if here else start) if start else 'the start'}"
    return [f"{begun}: {change}" for change in changes] or [begun]
