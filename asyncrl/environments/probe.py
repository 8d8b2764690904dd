"""Finds out what a user's environment, or one that runs user code, can be used for. Runs in its own process, so that
this code never runs in a command that only starts the others.

`python -m asyncrl.environments.probe ANSWER_FD PARENT_PID` is internal.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.chat.hub import NAME, described_in
from asyncrl.chat.names import AUTO, DEFAULT, Abilities, candidates
from asyncrl.data.local_tokenizer import load_local_tokenizer
from asyncrl.environments.episodes import Asked, EpisodeEnvironment
from asyncrl.environments.registry import (
    SETTING,
    Able,
    find_environment,
    is_of_the_user,
    make_environment,
    refuse_chat,
    refuse_cut,
)
from asyncrl.environments.stepped import is_stepped
from asyncrl.schema import EnvironmentConfig, ModelConfig
from asyncrl.user_code import IMPORT_S, answer, try_in_process


def check_environment(
    config: EnvironmentConfig, model: ModelConfig | None = None, timeout_s: float = IMPORT_S, *, overlong: str = "drop"
) -> None:
    """As `find_environment`, but only raises its errors.

    Args:
        model: model whose chat must support several turns, if episodes have several.
        overlong: as `data.overlong`.

    Raises:
        ConfigError: as `find_environment` and `refuse_cut`, or the import ended its process or took too long; or the
            model's chat does not support several turns, as far as local files tell.
    """
    if not is_of_the_user(config.name) and not hasattr(find_environment(config), "check"):
        return
    settings = {
        "environment": {"name": config.name, "args": dict(config.args)},
        "overlong": overlong,
        "model": {"path": model.path, "renderer": model.renderer, "chat": dict(model.chat)} if model else {},
    }
    try_in_process("asyncrl.environments.probe", settings, f"{SETTING}={config.name}", timeout_s)


def trial(settings: dict[str, Any]) -> None:
    """Import the environment and raise what is wrong with it."""
    config = EnvironmentConfig(**settings["environment"])
    factory: Any = find_environment(config)
    _refuse_cut(config, factory, settings["overlong"])
    own = is_of_the_user(config.name)
    asked = Asked(several=is_for_several(factory)) if own else factory.check(**config.args)
    chat = foreseen(**settings["model"]) if settings["model"] and (asked.several or asked.calls) else None
    if chat is not None:
        refuse_chat(config.name, asked, chat)


def _refuse_cut(config: EnvironmentConfig, factory: Callable[..., Any], overlong: str) -> None:
    """As `refuse_cut`; what a function creates is only known by creating it."""
    if overlong.startswith("truncate_") and is_of_the_user(config.name) and not inspect.isclass(factory):
        make_environment(config, overlong=overlong)
    refuse_cut(config.name, factory, overlong)


def is_for_several(factory: Callable[..., Any]) -> bool:
    """Whether the user's class declares episodes of several turns. If its objects decide that, none is created here."""
    if is_stepped(factory):
        return True
    if not inspect.isclass(factory) or not issubclass(factory, EpisodeEnvironment):
        return False
    made = [vars(each).get("__init__") for each in factory.__mro__]
    said = any("several_turns" in each.__code__.co_names for each in made if inspect.isfunction(each))
    return factory.several_turns and not said


def foreseen(path: str, renderer: str, chat: Mapping[str, Any]) -> Able | None:
    """Return what the chat of the model at `path` supports; None if only a worker can tell.

    Loads transformers only if the tokenizer is needed: the output of a template is compared with renderers.
    """
    try:
        local = load_local_tokenizer(described_in(path) or Path(path))
    except ValueError:
        return None  # reported with the data
    if local is None:
        return None
    if renderer == AUTO and (candidates(path) or NAME.fullmatch(path)):
        try:
            tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(
                path, trust_remote_code=False
            )
        except (OSError, ValueError):
            return None  # reported by the worker
        return importlib.import_module("asyncrl.chat.choice").open_chat(tokenizer, path, renderer, chat)
    chosen = renderer != AUTO
    return Abilities(
        name=renderer if chosen else DEFAULT,
        template="\n".join(filter(None, local.templates.values())),
        chosen=chosen,
        parser=bool(chat.get("tool_parser")),
    )


if __name__ == "__main__":
    answer(sys.argv[1:], trial)
