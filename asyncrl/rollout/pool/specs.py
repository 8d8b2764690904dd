"""Builds the spec of each worker of a pool: name, log, variables, and settings that hold wherever it runs."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

from asyncrl.checks.placement import VISIBLE, visible_gpus, worker_gpus
from asyncrl.checks.sources import HUB, is_own
from asyncrl.config import config_to_dict
from asyncrl.digests import run_digest
from asyncrl.rollout.host import WorkerSpec
from asyncrl.schema import Config


def worker_specs(config: Config, pool: int = 0) -> list[WorkerSpec]:
    """One spec per worker. Names contain the machine and the process of the pool: pools must not fence each other.

    Args:
        pool: number of this pool among those that share the run folder (see `pool_number`); each has logs of its own.
    """
    plain = absolute_paths(config_to_dict(config))
    environment = worker_environment(config)
    gpus = worker_gpus(config, visible_gpus() or ())
    digest = run_digest(config)
    return [
        WorkerSpec(
            name=f"rollout-{index}@{socket.gethostname()}.{os.getpid()}",
            restart=0,
            log_path=str(Path(plain["run"]["dir"]) / "logs" / f"rollout-{f'{pool}.' if pool else ''}{index}.log"),
            run_digest=digest,
            config=plain | {"engine": plain["engine"] | {"urls": config.engine.urls[index :: config.rollout.workers]}},
            environment=environment | ({VISIBLE: gpus[index]} if gpus[index] else {}),
        )
        for index in range(config.rollout.workers)
    ]


def worker_environment(config: Config) -> dict[str, str]:
    """Variables that must be set in a worker's process before it imports anything."""
    return {
        "OMP_NUM_THREADS": str(config.engine.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path])),
        "PYTHONUNBUFFERED": "1",
    }


def _file(given: str) -> str:
    return str(Path(given).resolve())


def _folder(given: str) -> str:
    """A name on the hub is returned unchanged."""
    return _file(given) if Path(given).is_dir() else given


def _code(spec: str) -> str:
    """Make the file of `file.py:name` absolute; `package.module:name` is returned unchanged."""
    place, _, name = spec.rpartition(":")
    return f"{_file(place)}:{name}" if place.endswith(".py") else spec


def _rows(given: str) -> str:
    """Files, folders, globs and classes; a name on the hub is returned unchanged."""
    if given.startswith(HUB):
        return given
    return _code(given) if is_own(given) else _file(given)


def _command(given: str) -> str:
    """Make the files named in the command of an MCP server absolute."""
    return shlex.join(_file(word) if Path(word).is_file() else word for word in shlex.split(given))


ITSELF, EACH = "", "*"
"""In `PATHS`: the value, if it is a text and not a mapping; and each entry of a mapping."""
REWARD: dict[str, Any] = {ITSELF: _code, "function": _code, "model": _folder}
REWARD["functions"] = {EACH: REWARD}
ENVIRONMENT = {ITSELF: _code, "name": _code}
ARGUMENTS = {
    "tools": {"functions": _code, "mcp": _command},
    "openai": {"agent": _code},
    "gymnasium": {"env": _code},
    "verifiers": {"path": _file},
    "search": {"corpus": _file},
}
"""Name of an environment -> those of its `args` that name files."""
SET = {ITSELF: _rows, "path": _rows, "reward": REWARD, "environment": ENVIRONMENT}
PATHS: dict[str, Any] = {
    "run": {"dir": _file},
    "replay": {"keys": _file},
    "model": {"path": _folder},
    "data": {"path": _rows, "mixture": {EACH: {ITSELF: _rows, "path": _rows}}},
    "eval": {"path": _rows, "sets": {EACH: SET}},
    "reward": REWARD,
    "environment": ENVIRONMENT,
    "rollout": {"filters": _code},
}
"""Settings that name files, as texts or lists of texts -> what makes one absolute."""


def absolute_paths(settings: Any, paths: Any = PATHS) -> Any:
    """Make the paths of local files absolute: a Ray actor does not run in the command's working directory."""
    if isinstance(settings, dict) and isinstance(paths, dict):
        if paths is ENVIRONMENT:
            paths = {**paths, "args": ARGUMENTS.get(settings.get("name", ""), {})}
        return {key: absolute_paths(part, paths.get(key, paths.get(EACH, {}))) for key, part in settings.items()}
    absolute = paths.get(ITSELF) if isinstance(paths, dict) else paths
    if absolute is None or not settings:
        return settings
    return list(map(absolute, settings)) if isinstance(settings, list | tuple) else absolute(settings)
