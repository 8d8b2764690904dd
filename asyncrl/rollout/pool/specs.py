"""Builds the spec of each worker of a pool: name, log, variables, and settings that hold wherever it runs."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Callable, Mapping
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


def absolute_paths(config: dict[str, Any]) -> dict[str, Any]:
    """Make the paths of local files absolute: a Ray actor does not run in the command's working directory."""
    for group, key in (("run", "dir"), ("replay", "keys")):
        if config[group][key]:
            config[group][key] = str(Path(config[group][key]).resolve())
    config["model"]["path"] = _absolute_folder(config["model"]["path"])
    for entry in (config["data"], config["eval"]):
        entry["path"] = _absolute_rows(entry["path"])
    config["data"]["mixture"] = {
        name: entry | {"path": _absolute_rows(entry["path"])} if isinstance(entry, dict) else _absolute_rows(entry)
        for name, entry in config["data"]["mixture"].items()
    }
    config["reward"] = _absolute_reward(config["reward"])
    config["environment"] = _absolute_environment(config["environment"])
    config["eval"]["sets"] = {name: _absolute_set(entry) for name, entry in config["eval"]["sets"].items()}
    config["rollout"]["filters"] = [_absolute_function(spec) for spec in config["rollout"]["filters"]]
    return config


def _absolute_set(entry: Any) -> Any:
    """Make the paths in one entry of `eval.sets` absolute."""
    parts = {"path": _absolute_rows, "reward": _absolute_reward, "environment": _absolute_environment}
    return _each_absolute(entry, parts) if isinstance(entry, dict) else _absolute_rows(entry)


def _absolute_reward(entry: Any) -> Any:
    """Make the paths of a reward absolute, given its settings or only its function."""
    if isinstance(entry, str):
        return _absolute_function(entry)
    found = _each_absolute(entry, {"function": _absolute_function, "model": _absolute_folder})
    if "functions" in entry:
        found["functions"] = {name: _absolute_reward(term) for name, term in entry["functions"].items()}
    return found


def _absolute_environment(entry: Any) -> Any:
    """Make the paths of an environment absolute, given its settings or only its name."""
    if isinstance(entry, str):
        return _absolute_function(entry)
    args = {
        "tools": {"functions": _absolute_functions, "mcp": _absolute_commands},
        "openai": {"agent": _absolute_function},
        "gymnasium": {"env": _absolute_function},
        "verifiers": {"path": _absolute_file},
        "search": {"corpus": _absolute_file},
    }
    own = args.get(entry.get("name", ""), {})
    return _each_absolute(entry, {"name": _absolute_function, "args": lambda given: _each_absolute(given, own)})


def _each_absolute(entry: dict[str, Any], parts: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Apply `parts` to these values of `entry`, unless they are missing or empty."""
    return entry | {key: absolute(entry[key]) for key, absolute in parts.items() if entry.get(key)}


def _absolute_file(given: str) -> str:
    return str(Path(given).resolve())


def _absolute_folder(given: str) -> str:
    """A name on the hub is returned unchanged."""
    return str(Path(given).resolve()) if given and Path(given).is_dir() else given


def _absolute_rows(given: Any) -> Any:
    """Make a path of rows, or each in a list, absolute: files, folders and globs; not names on the hub and classes."""
    if isinstance(given, list | tuple):
        return [_absolute_rows(each) for each in given]
    if not given or given.startswith(HUB):
        return given
    return _absolute_function(given) if is_own(given) else _absolute_file(given)


def _absolute_functions(specs: list[str]) -> list[str]:
    return [_absolute_function(spec) for spec in specs]


def _absolute_commands(commands: list[str]) -> list[str]:
    """Make the files named in the commands of MCP servers absolute."""
    return [
        shlex.join(str(Path(word).resolve()) if Path(word).is_file() else word for word in shlex.split(command))
        for command in commands
    ]


def _absolute_function(spec: str) -> str:
    """Make the file of `file.py:name` absolute; `package.module:name` is returned unchanged."""
    place, _, name = spec.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else spec
