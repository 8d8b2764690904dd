"""What a worker on another machine receives from this one: the user's code by path, its role's keys, variables.

    pack(config) here -> the call that starts the worker -> `unpacked` there, in a folder that goes with the worker

It is sent with the call, and never in Ray's runtime_env, which appears in Ray's logs and in the output of `ray list`,
where everybody with access to the cluster could read keys and tokens.
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
from asyncrl.schema import Config
from asyncrl.storage.held import held_folder
from asyncrl.user_code import with_imports

TRAVELLING = ("HF_*", "NCCL_*", "VLLM_*")
OF_ONE_MACHINE = ("VLLM_HOST_IP",)
"""The address of one machine, which holds for no other."""
KEYS = ("*.key", "worker.key_secret")
"""The files in `replay.keys` that a worker needs."""
WITH_PATHS = ("model", "data", "eval", "reward", "environment", "rollout")
"""Groups of settings that name files of a worker."""
MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Luggage:
    """The contents are not in the repr, so that objects holding this can be logged."""

    files: dict[str, bytes] = field(default_factory=dict, repr=False)
    """Contents by absolute path on this machine."""
    keys: dict[str, bytes] = field(default_factory=dict, repr=False)
    """Contents by file name in `replay.keys`."""
    environment: dict[str, str] = field(default_factory=dict, repr=False)


def pack(config: Config, settings: Mapping[str, Any], environment: Mapping[str, str]) -> Luggage:
    """Collect what a worker on another machine needs from this one.

    Args:
        settings: the settings of `config` with absolute local paths (`pool.specs`).
        environment: environment variables of this process.

    Raises:
        ConfigError: the code is larger than a call may carry; or see `travelling`.
    """
    files: dict[str, bytes] = {}
    for _, text in texts_of({group: settings[group] for group in WITH_PATHS}):
        place = text.rpartition(":")[0]
        if place.endswith(".py") and os.path.isabs(place) and os.path.isfile(place):
            files |= code_of(Path(place))
    size = sum(map(len, files.values()))
    if size > MOST_BYTES:
        raise ConfigError(
            f"your files that are given by path, with the files that they import, are {size >> 20} MiB, but at most "
            f"{MOST_BYTES >> 20} MiB are copied to other machines. Install them there as a package: PACKAGE.MODULE:NAME"
        )
    folder = Path(settings["replay"]["keys"]) if settings["replay"]["keys"] else None
    keys = {path.name: path.read_bytes() for name in KEYS for path in (folder.glob(name) if folder else ())}
    return Luggage(files=files, keys=keys, environment=travelling(config.ray.environment, environment))


def travelling(named: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to send. Raises ConfigError if a named one is not set."""
    chosen = {
        name: value
        for name, value in environment.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in TRAVELLING) and name not in OF_ONE_MACHINE
    }
    for pattern in named:
        found = {name: value for name, value in environment.items() if fnmatch.fnmatchcase(name, pattern)}
        if not found:
            raise ConfigError(
                f"ray.environment names {pattern!r}, but no such variable is set here. Export it, or leave it out"
            )
        chosen |= found
    return chosen


def texts_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for all texts in settings."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from texts_of(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_of(each, key)


def code_of(file: Path) -> dict[str, bytes]:
    """A file and everything that it imports, directly or indirectly, from its folder, by absolute path."""
    return {str(each): code for each, code in with_imports(file, _beside).items()}


def _beside(folder: Path, module: tuple[str, ...]) -> Iterable[Path]:
    """All files of a package, because it may load any of them by a computed name."""
    name = module[0]
    alone = folder / f"{name}.py"
    return [alone] if alone.is_file() else sorted(each for each in (folder / name).rglob("*.py") if each.is_file())


def local_paths(settings: Mapping[str, Any]) -> dict[str, str]:
    """path -> the setting that names it, for absolute paths of models and data that exist here and are not sent."""
    named = texts_of({group: settings[group] for group in WITH_PATHS})
    return {text: key for key, text in named if os.path.isabs(text) and there(text)}


def there(path: str) -> bool:
    """Whether something exists at this path, or glob, on this machine."""
    return os.path.exists(path) or bool(glob.glob(path))


@contextlib.contextmanager
def unpacked(luggage: Luggage, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the settings with paths of this machine. If the same files already exist here at the same paths, those are
    used, because there may be files next to them that they read."""
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
