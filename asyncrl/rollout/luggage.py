"""What a worker on another machine is given of this one: the user's code by path, the keys of its role, variables.

    pack(config) here -> the call that starts the worker -> `unpacked` there, in a folder that ends with the worker

It goes with the call and never in Ray's runtime_env: that stands in Ray's logs and in what `ray list` shows, where
everybody who reaches the cluster reads keys and tokens.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.own_code import with_imports
from asyncrl.schema import Config
from asyncrl.storage.held import held_folder

TRAVELLING = ("HF_*", "NCCL_*", "VLLM_*")
OF_ONE_MACHINE = ("VLLM_HOST_IP",)
"""Its address, which is no other's."""
KEYS = ("*.key", "worker.key_secret")
"""Of `replay.keys`, what a worker needs."""
WITH_PATHS = ("model", "data", "eval", "reward", "environment", "rollout")
"""Settings that name files of a worker."""
MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Luggage:
    """Contents are in no repr: what holds this may be logged."""

    files: dict[str, bytes] = field(default_factory=dict, repr=False)
    """By their absolute path here."""
    keys: dict[str, bytes] = field(default_factory=dict, repr=False)
    """By their name in `replay.keys`."""
    environment: dict[str, str] = field(default_factory=dict, repr=False)


def pack(config: Config, settings: Mapping[str, Any], environment: Mapping[str, str]) -> Luggage:
    """
    Args:
        settings: those of `config`, local paths absolute (`pool.specs`).
        environment: variables of this process.

    Raises:
        ConfigError: the code is larger than what a call carries; or see `travelling`.
    """
    files: dict[str, bytes] = {}
    for _, text in texts_of({group: settings[group] for group in WITH_PATHS}):
        place = text.rpartition(":")[0]
        if place.endswith(".py") and os.path.isabs(place) and os.path.isfile(place):
            files |= code_of(Path(place))
    size = sum(map(len, files.values()))
    if size > MOST_BYTES:
        raise ConfigError(
            f"your files by path, with what they import from beside them, are {size >> 20} MiB, and at most "
            f"{MOST_BYTES >> 20} travel to other machines. Install them there as a package: PACKAGE.MODULE:NAME"
        )
    folder = Path(settings["replay"]["keys"]) if settings["replay"]["keys"] else None
    keys = {path.name: path.read_bytes() for name in KEYS for path in (folder.glob(name) if folder else ())}
    return Luggage(files=files, keys=keys, environment=travelling(config.ray.environment, environment))


def travelling(named: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that go along. Raises ConfigError: one that was named is not set."""
    chosen = {
        name: value
        for name, value in environment.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in TRAVELLING) and name not in OF_ONE_MACHINE
    }
    for pattern in named:
        found = {name: value for name, value in environment.items() if fnmatch.fnmatchcase(name, pattern)}
        if not found:
            raise ConfigError(
                f"ray.environment names {pattern!r}, and no such variable is set here. Export it, or leave it out"
            )
        chosen |= found
    return chosen


def texts_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of all texts in settings."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from texts_of(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_of(each, key)


def code_of(file: Path) -> dict[str, bytes]:
    """A file, and what it imports from beside it, and what that imports: by absolute path."""
    return {str(each): code for each, code in with_imports(file, _beside).items()}


def _beside(folder: Path, module: tuple[str, ...]) -> Iterable[Path]:
    """Of a package all files: it may load any of them by a name that it makes up."""
    name = module[0]
    alone = folder / f"{name}.py"
    return [alone] if alone.is_file() else sorted(each for each in (folder / name).rglob("*.py") if each.is_file())


def local_paths(settings: Mapping[str, Any]) -> dict[str, str]:
    """path -> the setting that names it: model and data, absolute, that lie here and do not travel."""
    named = texts_of({group: settings[group] for group in WITH_PATHS})
    return {text: key for key, text in named if os.path.isabs(text) and there(text)}


def there(path: str) -> bool:
    """Whether something is at this path, or glob, on this machine."""
    return os.path.exists(path) or bool(glob.glob(path))


@contextlib.contextmanager
def unpacked(luggage: Luggage, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The settings with paths of this machine. What lies at its own path here, the same, is used there: beside it may
    be files that it reads."""
    given = settings.get("replay", {}).get("keys", "")
    files = {} if _lie_here(luggage.files) else luggage.files
    keys = {} if _lie_here({f"{given}/{key}": data for key, data in luggage.keys.items()}) else luggage.keys
    if not files and not keys:
        yield dict(settings)
        return
    with held_folder() as name:
        moved = {path: f"{name}/code{path}" for path in files}
        for path, data in files.items():
            _write(Path(moved[path]), data)
        for key, data in keys.items():
            _write(name / "keys" / key, data)
        found = {group: _elsewhere(value, moved) if group in WITH_PATHS else value for group, value in settings.items()}
        yield found | ({"replay": {**settings["replay"], "keys": f"{name}/keys"}} if keys else {})


def _lie_here(files: Mapping[str, bytes]) -> bool:
    try:
        return all(Path(path).read_bytes() == data for path, data in files.items())
    except OSError:
        return False


def _elsewhere(value: Any, moved: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        place, colon, name = value.rpartition(":")
        return f"{moved[place]}:{name}" if colon and place in moved else value
    if isinstance(value, Mapping):
        return {key: _elsewhere(each, moved) for key, each in value.items()}
    return [_elsewhere(each, moved) for each in value] if isinstance(value, list | tuple) else value


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
