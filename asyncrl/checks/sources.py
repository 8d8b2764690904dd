"""Sources of rows: resolves `data.path` and `data.mixture`, and finds their files on this machine.

a file     FILE.jsonl, FILE.parquet        a list of any of them, or a glob: `data.path='data/*.parquet'`
a folder   made by `save_to_disk`, or of JSONL or parquet files
the hub    hf:NAME[[:CONFIG]:SPLIT]
a class    FILE.py:NAME or PACKAGE.MODULE:NAME
"""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.checks.conditions import Condition, conditions
from asyncrl.checks.hints import refuse_others
from asyncrl.errors import ConfigError, DataError
from asyncrl.schema import RowSettings

HUB = "hf:"
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
"""Kinds of files by extension."""
OF_A_CLASS = re.compile(r"(.+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
SAVED = "state.json"
"""File in a folder written by `save_to_disk` of `datasets`; a folder with several splits has SPLITS instead."""
SPLITS = "dataset_dict.json"
SPLIT_WORDS = ("train", "test", "valid", "validation", "dev", "eval")
IN_A_MIXTURE = ("path", "weight", "where", "prompt_column", "args")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A set of rows sampled as one: all of `data.path`, or one entry of `data.mixture`."""

    key: str
    """The setting that names it, for errors."""
    specs: tuple[str, ...]
    """Paths as given: files, folders, globs, names on the hub, classes."""
    name: str = ""
    """Name in the mixture; empty without a mixture."""
    weight: float = 1.0
    prompt_column: str = "prompt"
    where: tuple[Condition, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for a user's class."""

    @property
    def title(self) -> str:
        given = ", ".join(self.specs)
        return f"{self.name} ({given})" if self.name else given

    @property
    def runs_user_code(self) -> bool:
        return any(is_own(spec) for spec in self.specs)


@dataclass(frozen=True, slots=True)
class Place:
    """A file, folder, hub dataset or class that can be opened."""

    kind: str
    """`jsonl`, `parquet`, `saved`, `hub` or `own`."""
    path: str


def is_own(spec: str) -> bool:
    """Return whether a path names a user's class, so that reading it runs user code."""
    return not spec.startswith(HUB) and OF_A_CLASS.fullmatch(spec) is not None


def sources(data: RowSettings, key: str = "data.path") -> tuple[Source, ...]:
    """Return the sources of the training prompts: one for `data.path`, or one per entry of the mixture, in its order.

    Args:
        key: name of the setting with the path, if it is not the training's.

    Raises:
        ConfigError: an entry is invalid.
    """
    if not data.mixture:
        return (_source(key, "", {"path": data.path}, data),)
    return tuple(_entry(name, given, data) for name, given in data.mixture.items())


def _entry(name: str, given: Any, data: RowSettings) -> Source:
    key = f"data.mixture.{name}"
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise ConfigError(f"{key}: the name of a source must be 1 to 64 letters, digits, `_` or `-`. Rename it")
    entry = given if isinstance(given, Mapping) else {"path": given}
    refuse_others(key, entry, IN_A_MIXTURE, "a source has")
    if "path" not in entry:
        raise ConfigError(f"{key} has no path. Give {key}.path=FILE")
    return _source(key, name, entry, data)


def _source(key: str, name: str, entry: Mapping[str, Any], data: RowSettings) -> Source:
    place = f"{key}.path" if name else key
    weight, args = entry.get("weight", 1.0), entry.get("args", data.args)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ConfigError(
            f"{key}.weight must be a number above 0; got {weight!r}. To draw no rows of a source, leave it out"
        )
    if not isinstance(args, Mapping):
        raise ConfigError(f"{key}.args must be named arguments, `{key}.args.NAME=VALUE`; got {args!r}")
    where = {**data.where, **entry.get("where", {})} if isinstance(entry.get("where", {}), Mapping) else entry["where"]
    return Source(
        key=place,
        name=name,
        specs=_specs(place, entry["path"]),
        weight=float(weight),
        prompt_column=str(entry.get("prompt_column", data.prompt_column)),
        where=conditions(where, f"{key}.where" if "where" in entry else "data.where"),
        args=dict(args),
    )


def _specs(key: str, given: Any) -> tuple[str, ...]:
    specs = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list | tuple) else ()
    if not specs or not all(isinstance(spec, str) and spec for spec in specs):
        raise ConfigError(
            f"{key} must be a path, or a list of paths, of rows; got {given!r}. Example: {key}=[a.jsonl,b.parquet]"
        )
    return specs


def places(source: Source) -> list[Place]:
    """Return what a source's paths stand for on this machine, with globs and folders expanded. Reads no rows.

    Raises:
        DataError: there is no such file, or its kind is unknown.
    """
    return [place for spec in source.specs for place in _places(spec, source.key)]


def _places(spec: str, key: str) -> list[Place]:
    if spec.startswith(HUB):
        return [Place("hub", spec)]
    path = Path(spec)
    if path.is_dir():
        return _in_folder(path, key)
    if path.is_file():
        return [_file(path, key)]
    if is_own(spec):
        file = spec.rpartition(":")[0]
        if file.endswith(".py") and not Path(file).is_file():
            raise DataError(f"{key}={spec}: there is no file {file} (looked from {Path.cwd()})")
        return [Place("custom", spec)]
    if glob.has_magic(spec):
        found = sorted(Path(name) for name in glob.glob(spec, recursive=True) if Path(name).is_file())
        if not found:
            raise DataError(f"{key}={spec}: no file matches (looked from {Path.cwd()})")
        return [_file(each, key) for each in found]
    raise DataError(
        f"{key}={spec}: there is no such file (looked from {Path.cwd()}). Give an existing JSONL or parquet file, a "
        "folder of them, or hf:NAME for a dataset of the Hugging Face hub"
    )


def _file(path: Path, key: str) -> Place:
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise DataError(
            f"{key}={path}: rows are read from {', '.join(KINDS)} files, not from "
            f"{path.suffix or 'files without an extension'}. Convert it, or give a class that reads it (FILE.py:NAME)"
        )
    return Place(kind, str(path))


def _in_folder(folder: Path, key: str) -> list[Place]:
    if (folder / SAVED).is_file():
        return [Place("saved", str(folder))]
    if (folder / SPLITS).is_file():
        splits = sorted(each.name for each in folder.iterdir() if (each / SAVED).is_file())
        raise DataError(
            f"{key}={folder} holds the splits {', '.join(splits)} of a dataset. Give one: {key}={folder / splits[0]}"
            if splits
            else f"{key}={folder} was made by save_to_disk, but has no split. Save the dataset again"
        )
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.suffix.lower() in KINDS)
    kinds = {KINDS[file.suffix.lower()] for file in files}
    splits = {word for file in files for word in SPLIT_WORDS if re.match(rf"{word}(?![a-z])", file.name.lower())}
    if not files:
        raise DataError(
            f"{key}={folder} has no {', '.join(KINDS)} file, and was not made by save_to_disk of `datasets`. Give the "
            "folder that has the rows"
        )
    if len(kinds) > 1 or len(splits) > 1:
        what = "several splits" if len(splits) > 1 else "files of several kinds"
        names = ", ".join(file.name for file in files[:6])
        raise DataError(
            f"{key}={folder} holds {what} ({names}). Name the ones that you mean: {key}='{files[0]}', or a glob"
        )
    return [Place(KINDS[file.suffix.lower()], str(file)) for file in files]
