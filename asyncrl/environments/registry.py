"""Environments by the name they have in `environment.name`."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.environments.base import Environment
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.errors import ConfigError
from asyncrl.schema import EnvironmentConfig

ENVIRONMENTS: dict[str, Callable[[], Environment]] = {"single_turn": SingleTurn}


def make_environment(config: EnvironmentConfig) -> Environment:
    """Raises ConfigError for an unknown name."""
    if config.name not in ENVIRONMENTS:
        raise ConfigError(f"environment.name={config.name!r} does not exist. Choose from: {', '.join(ENVIRONMENTS)}")
    return ENVIRONMENTS[config.name]()
