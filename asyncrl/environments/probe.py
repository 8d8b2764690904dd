"""What an environment of the user, or one that runs code of the user, can be used for: found out by a process of its
own, so that this code never runs in a command that only starts the others.

`python -m asyncrl.environments.probe SETTINGS ANSWER_FD PARENT_PID` is internal.
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
from asyncrl.own_code import IMPORT_S, answer, try_in_process
from asyncrl.schema import EnvironmentConfig, ModelConfig


def check_environment(
    config: EnvironmentConfig, model: ModelConfig | None = None, timeout_s: float = IMPORT_S, *, overlong: str = "drop"
) -> None:
    """As `find_environment`, of which only the refusal is wanted.

    Args:
        model: whose chat must be one for several turns, where episodes have several.
        overlong: as `data.overlong`.

    Raises:
        ConfigError: what `find_environment` and `refuse_cut` say, or that the import ended its process or took too
            long; or the model's chat is not to be had for several turns, as far as files that are here tell.
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
    """Import it and say what there is to say."""
    config = EnvironmentConfig(**settings["environment"])
    factory: Any = find_environment(config)
    _refuse_cut(config, factory, settings["overlong"])
    own = is_of_the_user(config.name)
    asked = Asked(several=is_for_several(factory)) if own else factory.check(**config.args)
    chat = foreseen(**settings["model"]) if settings["model"] and (asked.several or asked.calls) else None
    if chat is not None:
        refuse_chat(config.name, asked, chat)


def _refuse_cut(config: EnvironmentConfig, factory: Callable[..., Any], overlong: str) -> None:
    """As `refuse_cut`; what a function makes is known when it is made."""
    if overlong.startswith("truncate_") and is_of_the_user(config.name) and not inspect.isclass(factory):
        make_environment(config, overlong=overlong)
    refuse_cut(config.name, factory, overlong)


def is_for_several(factory: Callable[..., Any]) -> bool:
    """Whether the user's class says that its episodes have several turns. One whose objects say so is not made here."""
    if is_stepped(factory):
        return True
    if not inspect.isclass(factory) or not issubclass(factory, EpisodeEnvironment):
        return False
    made = [vars(each).get("__init__") for each in factory.__mro__]
    said = any("several_turns" in each.__code__.co_names for each in made if inspect.isfunction(each))
    return factory.several_turns and not said


def foreseen(path: str, renderer: str, chat: Mapping[str, Any]) -> Able | None:
    """What the chat of the model at `path` is good for; None where only a worker can tell.

    Loads transformers only where it takes the tokenizer to know: what a template writes is compared with renderers.
    """
    try:
        local = load_local_tokenizer(described_in(path) or Path(path))
    except ValueError:
        return None  # told with the data
    if local is None:
        return None
    if renderer == AUTO and (candidates(path) or NAME.fullmatch(path)):
        try:
            tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(
                path, trust_remote_code=False
            )
        except (OSError, ValueError):
            return None  # told by the worker
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
