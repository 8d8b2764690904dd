"""What a role needs on the machine it starts on: files, model folder, optional packages. Asked before a start."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.errors import ConfigError
from asyncrl.hints import join_problems

if TYPE_CHECKING:
    from asyncrl.config import Config


def check_machine(config: Config, role: str) -> None:
    """Files and extras that `role` (`local`, `learner`, `rollout` or `replay`) needs here, before anything starts.

    Raises:
        ConfigError: with everything that is missing.
    """
    problems: list[str] = []
    if role in ("local", "rollout"):
        problems += _missing_files(config)
    if role in ("local", "learner", "rollout"):
        problems += _missing_model(config)
    if role in ("local", "learner"):
        problems += _missing_extras(config)
    if config.replay.keys and not Path(config.replay.keys).is_dir():
        problems.append(f"replay.keys={config.replay.keys} is no directory here. Copy the keys of the run to it")
    if problems:
        raise ConfigError(join_problems(problems))


def _missing_files(config: Config) -> Iterator[str]:
    for key, path in (("data.path", config.data.path), ("eval.path", config.eval.path)):
        if path and not Path(path).is_file():
            yield f"{key}={path}: there is no such file (looked from {Path.cwd()}). Give an existing JSONL file"
    where, colon, _ = config.reward.function.rpartition(":")
    if not colon:
        yield f"reward.function must be file.py:name or package.module:name; got {config.reward.function!r}"
    elif where.endswith(".py") and not Path(where).is_file():
        yield f"reward.function={config.reward.function}: there is no file {where} (looked from {Path.cwd()})"


def _missing_model(config: Config) -> Iterator[str]:
    path = config.model.path
    folder = Path(path)
    # `org/name` is a hub name; anything that starts like a path is meant as one.
    if path.startswith(("/", ".", "~")) and not folder.is_dir():
        yield f"model.path={path}: there is no such directory. Give the folder of a Hugging Face model"
    elif folder.is_dir() and not (folder / "config.json").is_file():
        yield f"model.path={path} has no config.json. Give the folder of a Hugging Face model with its tokenizer"


def _missing_extras(config: Config) -> Iterator[str]:
    for key, wanted, module in (
        ("telemetry.wandb", config.telemetry.wandb, "wandb"),
        ("telemetry.tensorboard", config.telemetry.tensorboard, "tensorboard"),
    ):
        if wanted and importlib.util.find_spec(module) is None:
            yield f"{key}=true needs the extra: pip install 'asyncrl[{module}]'. Or set {key}=false"
