"""What a role needs on the machine it starts on: files, model folder, optional packages. Asked before a start."""

from __future__ import annotations

import importlib.util
import json
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
        problems += _missing_checkpoint(config)
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
    elif folder.is_dir():
        yield from (f"model.path={path} {problem}" for problem in _broken_model(folder))


TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


def _broken_model(folder: Path) -> Iterator[str]:
    """What would else be found only after the start of every process, by each of its restarts again."""
    try:
        json.loads((folder / "config.json").read_text())
    except ValueError as error:
        yield f"has a config.json that is no JSON ({error}). Copy the model again"
    weights = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if not weights:
        yield "has no weights. Give a folder with *.safetensors (an unfinished download or a tokenizer alone has none)"
    for file in weights:
        if file.suffix == ".safetensors" and not _is_whole(file):
            yield f"has a damaged or half-written {file.name}. Copy the model again"
    # Without these transformers makes an empty tokenizer, to which every prompt is nothing.
    if not any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES):
        yield "has no tokenizer. Save it there: AutoTokenizer.from_pretrained(...).save_pretrained(folder)"


def _is_whole(file: Path) -> bool:
    """Is the file of the length that its header announces?"""
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        if not 0 < length <= file.stat().st_size - 8:
            return False
        try:
            header = json.loads(data.read(length))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0) == file.stat().st_size


def _missing_checkpoint(config: Config) -> Iterator[str]:
    if config.resume not in ("never", "auto") and not Path(config.resume).is_dir():
        yield (
            f"resume={config.resume}: there is no such checkpoint (looked from {Path.cwd()}). Give a folder like "
            "runs/NAME/ckpt/step_50, or resume=auto for the newest of run.dir"
        )


def _missing_extras(config: Config) -> Iterator[str]:
    for key, wanted, module in (
        ("telemetry.wandb", config.telemetry.wandb, "wandb"),
        ("telemetry.tensorboard", config.telemetry.tensorboard, "tensorboard"),
    ):
        if wanted and importlib.util.find_spec(module) is None:
            yield f"{key}=true needs the extra: pip install 'asyncrl[{module}]'. Or set {key}=false"
