"""Settings files among the arguments: `asyncrl local my.yaml lr=...`, `asyncrl local runs/x/config.yaml`.

A file is replaced by equivalent `key=value` arguments, which can be passed to every process of the run.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.checks.addresses import host_of
from asyncrl.checks.override_syntax import quoted, written
from asyncrl.checks.rules.switches import without_effect
from asyncrl.config import choice_values, config_dir, config_groups, default_settings, read_settings
from asyncrl.errors import ConfigError
from asyncrl.schema import Config
from asyncrl.settings.loss.keys import KEYS as LOSS_KEYS
from asyncrl.settings.loss.keys import LossConfig
from asyncrl.settings.loss.meaning import resolve
from asyncrl.telemetry.folder.origins import FromFile
from asyncrl.telemetry.folder.run_folder import RUN_FILE, without_blots

ENDINGS = (".yaml", ".yml")
OF_ITS_OWN = ("resume", "overwrite", "run.name", "run.dir")
"""Settings of a run that a repeated run does not take over."""
ONLY_A_RUN_WRITES = {"seed", "resume", "overwrite", "run.name", "run.dir"}
CHOOSES_A_FOLDER = ("run.name=", "run.dir=", "resume=", "overwrite=")


def with_files(arguments: Sequence[str], kind: type = Config) -> list[str]:
    """Return `arguments` with each settings file replaced by its settings that differ from the defaults; arguments
    after it win.

    Args:
        kind: schema of the settings; only that of a run has groups.

    Raises:
        ConfigError: a file does not exist, or cannot be read.
    """
    found: list[str] = []
    for place, text in enumerate(arguments):
        path, later = Path(text), arguments[place + 1 :]
        if not text.endswith(ENDINGS) or ("=" in text and not path.is_file()):
            found.append(text)
            continue
        if not path.is_file():
            raise ConfigError(f"there is no settings file {path}. Give the path of a YAML file, or key=value")
        found = _without(found, set(read_settings(path)))
        found += [FromFile.of(given, text) for given in _as_arguments(path, later, kind)]
    return found


def _without(arguments: Sequence[str], keys: set[str]) -> list[str]:
    return [text for text in arguments if text.partition("=")[0] not in keys]


def _as_arguments(path: Path, later: Sequence[str], kind: type) -> list[str]:
    values = without_blots(read_settings(path))
    if "loss.preset" in values:  # the file of the loss may set more than the preset
        values["loss"] = values.pop("loss.preset")
    groups = {group: str(name) for group, name in values.items() if kind is Config and group in config_groups()}
    settings = _new_settings({key: value for key, value in values.items() if key not in groups}, groups, kind)
    settings, own = _repeated(path, values, settings, without_effect(values), later)
    taken = _keys(later) | (_chosen(later) if kind is Config else set())
    chosen = [f"{group}={name}" for group, name in groups.items()]
    said = [f"{key}={written(value)}" for key, value in settings.items() if key not in taken]
    return [*_without(chosen, taken), *said, *own]


def _keys(arguments: Sequence[str]) -> set[str]:
    return {text.partition("=")[0] for text in arguments}


def _new_settings(values: dict[str, Any], groups: dict[str, str], kind: type) -> dict[str, Any]:
    """Return `values` without those that hold anyway, since a command line of 150 settings is unreadable."""
    known, filled = default_settings(kind), {}
    if "loss" in groups:
        known |= {f"loss.{key}": None for key in LOSS_KEYS}
    for group, name in groups.items():
        known |= _choice(group, name)
    if kind is Config:
        preset = str(groups.get("loss", known["loss.preset"]))
        filled = _filled({key: known[f"loss.{key}"] for key in LOSS_KEYS}, preset)
    return {
        key: value
        for key, value in values.items()
        if key not in known or value not in (known[key], filled.get(key, known[key]))
    }


def _choice(group: str, name: str) -> dict[str, Any]:
    """Return the values of a choice; empty for an unknown name, which is refused when the settings are composed."""
    return choice_values(group, name) if (config_dir() / group / f"{name}.yaml").is_file() else {}


def _filled(loss: dict[str, Any], preset: str) -> dict[str, Any]:
    """Return the loss with the preset's values where `loss` has none, as in a run's `config.yaml`."""
    # A setting that refers to another one has no value yet (loss.constant_length of loss=dr_grpo).
    known: dict[str, Any] = {
        key: value
        for key, value in loss.items()
        if value is not None and not (isinstance(value, str) and "${" in value)
    }
    try:
        resolved = resolve(LossConfig(preset=preset, **known))
    except ConfigError:  # the check of all settings has a better message
        return {}
    return {f"loss.{key}": getattr(resolved, key) for key in LOSS_KEYS}


def _repeated(
    path: Path, values: dict[str, Any], settings: dict[str, Any], idle: set[str], later: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return settings and further arguments of a file, adapted if a run wrote it.

    Args:
        values: the whole content of the file. settings: those that matter. idle: see `_of_a_run`.
    """
    if (path.parent / RUN_FILE).is_file():
        return _of_a_run(path.parent, settings, idle, later)
    return (_of_a_copy(path, settings, later) if _is_a_copy(values) else settings), []


def _of_a_run(
    folder: Path, settings: dict[str, Any], idle: set[str], later: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return settings and arguments to repeat a run, in a new folder beside its own unless the arguments choose one;
    without its `idle` settings, which were not refused when it started."""
    dropped = {*OF_ITS_OWN, *idle}
    kept = {key: value for key, value in settings.items() if key not in dropped}
    address = str(kept.get("replay.address", ""))
    if host_of(address) in ("127.0.0.1", "localhost"):
        kept.pop("replay.address")  # a port that was free at that time
    if any(text.startswith(("resume=", "overwrite=")) for text in later):
        same = [f"run.name={quoted(folder.resolve().name)}", f"run.dir={quoted(str(folder))}"]
        return kept, _without(same, _keys(later))
    if any(text.startswith(CHOOSES_A_FOLDER) for text in later):
        return kept, []
    base = re.sub(r"-\d+$", "", folder.resolve().name)
    fresh = next(name for n in itertools.count(2) if not (folder.parent / (name := f"{base}-{n}")).exists())
    print(f"repeats {folder} in {folder.parent / fresh} (run.name=NAME chooses another)", file=sys.stderr, flush=True)
    return kept, [f"run.name={quoted(fresh)}", f"run.dir={quoted(str(folder.parent / fresh))}"]


def _is_a_copy(values: dict[str, Any]) -> bool:
    """Whether it is what a run wrote, copied out of its folder: it names all that nobody writes down by hand."""
    return values.keys() >= ONLY_A_RUN_WRITES


def _of_a_copy(path: Path, settings: dict[str, Any], later: Sequence[str]) -> dict[str, Any]:
    """Its `overwrite=true` was meant for what was there when that run began, and would now delete that run itself."""
    kept = {key: value for key, value in settings.items() if key not in ("resume", "overwrite")}
    if any(text.startswith("run.name=") for text in later):
        kept.pop("run.dir", None)  # follows from the name
    for key in sorted(settings.keys() - kept.keys() - _keys(later)):
        print(f"{path} is a copy of a run's settings: {key}={settings[key]} is left out", file=sys.stderr, flush=True)
    return kept


def _chosen(later: Sequence[str]) -> set[str]:
    """Return the settings of the file that are overridden by a group chosen after it: `x.yaml loss=ppo`."""
    found: set[str] = set()
    for text in later:
        group, _, name = text.partition("=")
        if group == "loss":  # another preset has its own settings
            found |= {f"loss.{key}" for key in LOSS_KEYS}
        if group in config_groups():
            found |= set(_choice(group, name))
    return found
