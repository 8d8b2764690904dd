"""Functions of the user by path, and the three signatures of reward functions that are understood.

    ours:  f(completion, row) -> number or {"score": number, ...}
    verl:  compute_score(data_source, solution_str, ground_truth, extra_info=None)
    TRL:   f(prompts, completions, **columns) -> list, one entry per completion

They are told apart by their parameter names.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.errors import AsyncRLError, ConfigError, RewardError
from asyncrl.rewards.score import Outcome, to_score

Row = dict[str, Any]
GroupReward = Callable[[list[str], Row], list[Outcome]]
"""`(completions [G], row) -> scores or failures [G]`: what every signature is adapted to."""


def load_function(spec: str, setting: str = "reward.function") -> Callable[..., Any]:
    """The function, or class, named by `file.py:name` or `package.module:name`.

    Args:
        setting: which key named it, for the error.

    Raises:
        ConfigError: malformed, no such file, module or function; or importing it failed.
    """
    given = f"{setting}={spec!r}"
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{given} names no function. Write file.py:name or package.module:name")
    module = _load_file(Path(place), given) if place.endswith(".py") else _load_module(place, given)
    function = getattr(module, name, None)
    if function is None:
        defined = sorted(key for key, value in vars(module).items() if _is_of(module, value))
        raise ConfigError(f"{given}: {place} has no {name!r}. It defines: {', '.join(defined)}")
    if not callable(function):
        raise ConfigError(f"{given} is a {type(function).__name__}, not a function")
    return function


def _is_of(module: ModuleType, value: Any) -> bool:
    """Whether it is a function, or a class that the module itself defines."""
    own = inspect.isclass(value) and value.__module__ == module.__name__
    return own or inspect.isfunction(value)


def make_reward(spec: str, model: str = "") -> GroupReward:
    """The reward that `reward.function` names; with `model` it is a class or factory, called with that path first.

    Raises:
        ConfigError: it cannot be loaded, made or called.
    """
    function = load_function(spec)
    if not model:
        return adapt_reward(function, spec)
    try:
        made = function(model)
    except AsyncRLError:
        raise
    except Exception as error:  # user code at a process boundary: whatever it raises is one refused setting
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"making {spec} with reward.model={model} failed: {why}") from error
    if not callable(made):
        raise ConfigError(f"{spec} made a {type(made).__name__} of reward.model={model}, which cannot be called")
    return adapt_reward(made, f"{spec} of {model}")


def adapt_reward(function: Callable[..., Any], name: str) -> GroupReward:
    """Wrap any understood signature. Raises ConfigError if the function could never be called."""
    parameters = inspect.signature(function).parameters
    if "solution_str" in parameters and "ground_truth" in parameters:
        return _adapt_verl(function, name, parameters)
    if "completions" in parameters:
        return _adapt_trl(function, name, parameters)
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    starred = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    required = [p for p in positional if p.default is p.empty]
    if len(required) > 2 or (len(positional) < 2 and not starred):
        raise ConfigError(
            f"{name}{inspect.signature(function)} cannot be called as f(completion, row), "
            "compute_score(data_source, solution_str, ground_truth, extra_info) or f(prompts, completions, **columns)"
        )

    def per_completion(completions: list[str], row: Row) -> list[Outcome]:
        return [_outcome(lambda text=text: function(text, row), name) for text in completions]

    return per_completion


def _adapt_verl(function: Callable[..., Any], name: str, parameters: Any) -> GroupReward:
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def per_completion(completions: list[str], row: Row) -> list[Outcome]:
        reward_model = row.get("reward_model")
        if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
            raise RewardError(f"{name} needs the column reward_model.ground_truth; the row has: {', '.join(row)}")
        given = {
            "data_source": row.get("data_source", ""),
            "ground_truth": reward_model["ground_truth"],
            "extra_info": row.get("extra_info"),
        }
        given = {key: value for key, value in given.items() if takes_any or key in parameters}
        return [_outcome(lambda text=text: function(solution_str=text, **given), name) for text in completions]

    return per_completion


def _adapt_trl(function: Callable[..., Any], name: str, parameters: Any) -> GroupReward:
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def per_group(completions: list[str], row: Row) -> list[Outcome]:
        size = len(completions)
        chat = isinstance(row["prompt"], list)
        # As TRL does: a conversational prompt gets conversational completions.
        given: dict[str, Any] = {key: [value] * size for key, value in row.items() if takes_any or key in parameters}
        given.pop("prompt", None)
        given["completions"] = [[{"role": "assistant", "content": text}] if chat else text for text in completions]
        if takes_any or "prompts" in parameters:
            given["prompts"] = [row["prompt"]] * size
        missing = [k for k, p in parameters.items() if p.default is p.empty and p.kind < p.VAR_KEYWORD]
        missing = [k for k in missing if k not in given and parameters[k].kind is not inspect.Parameter.VAR_POSITIONAL]
        if missing:
            raise RewardError(f"{name} needs the column(s) {', '.join(missing)}; the row has: {', '.join(row)}")
        returned = settle(function(**given))
        if not isinstance(returned, list | tuple) or len(returned) != size:
            raise RewardError(f"{name} must return a list of {size} numbers, got {returned!r:.80}")
        return [_outcome(lambda entry=entry: entry, name) for entry in returned]

    return per_group


def _outcome(score: Callable[[], Any], name: str) -> Outcome:
    """What `score` says of one completion; its failure is that completion's alone."""
    try:
        return to_score(settle(score()), name)
    except RewardError as error:
        return error
    except Exception as error:  # user code at a process boundary: its failure is an answer
        return RewardError(f"{type(error).__name__}: {error}")


def settle(returned: Any) -> Any:
    """The result of a plain or an async function."""
    if inspect.isawaitable(returned):
        return asyncio.run(_wait(returned))
    return returned


async def _wait(awaitable: Any) -> Any:
    return await awaitable


def _load_file(path: Path, given: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{given}: there is no file {path} (looked from {Path.cwd()})")
    location = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
    assert location is not None and location.loader is not None  # holds for any name that ends in .py
    module = importlib.util.module_from_spec(location)
    # Registered and with its folder importable, so that dataclasses and imports of neighbouring files work in it.
    sys.modules[location.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        location.loader.exec_module(module)
    # User code at a process boundary: whatever it raises is one refused setting, the exit of a script included.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{given}: importing it failed: {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str, given: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # as above
        raise ConfigError(f"{given}: importing it failed: {type(error).__name__}: {error}") from error
