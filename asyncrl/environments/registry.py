"""Environments by what `environment.name` says: a name of ours, or where one of the user's is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from asyncrl.environments.base import Environment
from asyncrl.environments.guard import GuardedEnvironment
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.errors import ConfigError
from asyncrl.replay.payload import MAX_VOCABULARY
from asyncrl.rewards.loader import load_function
from asyncrl.schema import EnvironmentConfig

SETTING = "environment.name"
ENVIRONMENTS: dict[str, Callable[[], Environment]] = {"single_turn": SingleTurn}


def find_environment(config: EnvironmentConfig) -> Callable[[], Any]:
    """The class or factory that the settings name; nothing is made of it yet.

    Raises:
        ConfigError: an unknown name, or one of the user's that cannot be loaded, called or used.
    """
    name = config.name
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    if ":" not in name:
        known = ", ".join(ENVIRONMENTS)
        raise ConfigError(f"{SETTING}={name!r} does not exist. Choose from: {known}, or name yours as file.py:Name")
    factory = load_function(name, SETTING)
    try:
        inspect.signature(factory).bind()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{SETTING}={name} cannot be called without arguments: {error}. Give them defaults"
        ) from error
    if inspect.isclass(factory):
        _check_run(name, factory)
    return factory


def make_environment(config: EnvironmentConfig, vocabulary: int = MAX_VOCABULARY) -> Environment:
    """One of the user's is guarded: what it does wrong costs the group it was making.

    Args:
        vocabulary: token ids are below it.

    Raises:
        ConfigError: as `find_environment`; or making it failed.
    """
    factory = find_environment(config)
    if config.name in ENVIRONMENTS:
        return factory()
    try:
        made = factory()
    except Exception as error:  # user code at a process boundary: whatever it raises is one refused setting
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{SETTING}={config.name}: making the environment failed: {why}") from error
    _check_run(config.name, made)
    return GuardedEnvironment(config.name, made, vocabulary)


def _check_run(name: str, environment: Any) -> None:
    if not callable(getattr(environment, "run", None)):
        what = environment.__name__ if inspect.isclass(environment) else f"the {type(environment).__name__} it made"
        raise ConfigError(
            f"{SETTING}={name}: {what} has no run. Give it `async def run(self, prompt, size, tools) -> Episodes`"
        )
