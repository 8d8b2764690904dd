"""Finds environments by `environment.name`: a built-in name, or the location of a user's environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from asyncrl.chat.base import Chat
from asyncrl.checks.rules.settings import cuts_nothing
from asyncrl.environments.base import Environment
from asyncrl.environments.episodes import Asked, EpisodeEnvironment
from asyncrl.environments.games.environment import Gymnasium
from asyncrl.environments.guard import GuardedEnvironment
from asyncrl.environments.openai.environment import OpenAI
from asyncrl.environments.reasoning.environment import ReasoningGym
from asyncrl.environments.search.environment import Search
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.environments.stepped import Stepped, is_stepped, shared
from asyncrl.environments.tools.environment import Tools
from asyncrl.environments.tools.interpreter import Python
from asyncrl.environments.verifiers.environment import Verifiers
from asyncrl.errors import ConfigError
from asyncrl.replay.codec.group import MAX_VOCABULARY
from asyncrl.schema import EnvironmentConfig
from asyncrl.user_code import load_function

SETTING = "environment.name"
ENVIRONMENTS: dict[str, Callable[..., Environment]] = {
    "single_turn": SingleTurn,
    "tools": Tools,
    "python": Python,
    "search": Search,
    "reasoning_gym": ReasoningGym,
    "gymnasium": Gymnasium,
    "openai": OpenAI,
    "verifiers": Verifiers,
}


def is_of_the_user(name: str) -> bool:
    """Whether the name is `file.py:Name` or `package.module:Name`: finding it runs user code."""
    return ":" in name


def find_environment(config: EnvironmentConfig) -> Callable[[], Any]:
    """Return the class or factory that the settings name, without creating anything.

    Raises:
        ConfigError: an unknown name, a user's environment that cannot be loaded or used, or arguments it does not have.
    """
    name = config.name
    if is_of_the_user(name):
        factory = load_function(name, SETTING)
    elif name in ENVIRONMENTS:
        factory = ENVIRONMENTS[name]
    else:
        known = ", ".join(ENVIRONMENTS)
        raise ConfigError(f"{SETTING}={name!r} does not exist. Choose from: {known}, or name yours as file.py:Name")
    _check_args(name, factory, config.args)
    if inspect.isclass(factory) and not is_stepped(factory):
        _check_run(name, factory)
    return factory


def _check_args(name: str, factory: Callable[..., Any], args: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{SETTING}={name} cannot be called: {error}") from error
    try:
        signature.bind(**args)
    except TypeError as error:
        raise ConfigError(
            f"{SETTING}={name} cannot be created: {error}. It is called as {name.rpartition(':')[2]}{signature}, with "
            "the arguments in environment.args"
        ) from error


def make_environment(
    config: EnvironmentConfig, vocabulary: int = MAX_VOCABULARY, chat: Chat | None = None, *, overlong: str = "drop"
) -> Environment:
    """Create the environment. Errors of user code cost the group it was making, no more; only `single_turn` runs no
    user code.

    Args:
        vocabulary: token ids are below it.
        chat: the model's chat.
        overlong: as `data.overlong`.

    Raises:
        ConfigError: as `find_environment`; or creating it failed, or gave the same game twice; or it needs several
            turns and the model's chat has one; or prompts are cut that it reads whole.
    """
    factory = find_environment(config)
    if factory is SingleTurn:
        return SingleTurn()
    try:
        made = factory(**config.args)
        stepped = is_stepped(made) and not hasattr(made, "run")
        fault = shared(made, factory(**config.args)) if stepped else ""
    except ConfigError:
        raise
    except Exception as error:  # user code at a process boundary: any exception refuses one setting
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{SETTING}={config.name}: creating the environment failed: {why}") from error
    if fault:
        raise ConfigError(f"{SETTING}={config.name}: {fault}")
    if stepped:
        made = Stepped(factory, config.args)
    _check_run(config.name, made)
    refuse_cut(config.name, type(made), overlong)
    if chat is not None and isinstance(made, EpisodeEnvironment):
        refuse_chat(config.name, made.asked, chat)
    return GuardedEnvironment(config.name, made, vocabulary)


def refuse_cut(name: str, factory: Any, overlong: str) -> None:
    """Raises ConfigError if prompts are cut, and the class renders the messages of their rows."""
    renders = is_stepped(factory) or (inspect.isclass(factory) and issubclass(factory, EpisodeEnvironment))
    if renders and overlong.startswith("truncate_"):
        raise ConfigError(cuts_nothing(name, overlong))


class Able(Protocol):
    """What a chat supports."""

    @property
    def why_single(self) -> str: ...

    def why_no_calls(self, *, told: bool) -> str: ...


def refuse_chat(name: str, asked: Asked, chat: Able) -> None:
    """Raises ConfigError for an environment of several turns with a chat of one turn; or of tool calls with a chat
    without them."""
    if asked.several and chat.why_single:
        raise ConfigError(f"{SETTING}={name} has several turns, but {chat.why_single}")
    if asked.calls and (why := chat.why_no_calls(told=asked.told)):
        raise ConfigError(f"{SETTING}={name} needs calls in the form of the chat template, but {why}")


def _check_run(name: str, environment: Any) -> None:
    if not callable(getattr(environment, "run", None)):
        what = environment.__name__ if inspect.isclass(environment) else f"the {type(environment).__name__} it made"
        raise ConfigError(
            f"{SETTING}={name}: {what} has no run(). Give it `async def run(self, prompt, size, tools) -> Episodes`, "
            "or `reset(self, row)` and `step(self, text)`"
        )
