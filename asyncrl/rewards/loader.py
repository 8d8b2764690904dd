"""Loads rewards from the settings: functions with their arguments, instances of classes, and sums of several."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.checks.rewards import RewardTerm
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.rewards.call import UNTIMED, Call, CallClock, GroupReward
from asyncrl.rewards.forms import LOG_EXTRA, LOG_METRIC, adapt_reward, looks_at_tokens
from asyncrl.rewards.several import combine
from asyncrl.user_code import load_function

SUPPLIED = {
    *("completion", "row", "completion_ids", "finish_reason"),
    *("data_source", "solution_str", "ground_truth", "extra_info"),
    *("data_sources", "solution_strs", "ground_truths", "extra_infos"),
    *("prompts", "completions", "completions_ids", "trainer_state", LOG_EXTRA, LOG_METRIC),
}
"""Parameters that each call supplies."""


@dataclass(frozen=True, slots=True)
class MadeReward:
    score: GroupReward
    looks_at_tokens: bool
    """Whether token ids must be sent to it."""

    def __call__(self, call: Call) -> Any:
        return self.score(call)


def make_reward(terms: Sequence[RewardTerm], clock_of: Callable[[int], CallClock] = lambda _: UNTIMED) -> MadeReward:
    """Return the reward that `reward.function` or `reward.functions` name.

    Args:
        clock_of: returns the clock of the function with this index in `terms`.

    Raises:
        ConfigError: a function cannot be loaded, created or called, or does not have such an argument.
    """
    loaded = [(term, *_load(term)) for term in terms]
    adapted = [(term, adapt_reward(function, name, clock_of(at))) for at, (term, function, name) in enumerate(loaded)]
    return MadeReward(combine(adapted), any(looks_at_tokens(function) for _, function, _ in loaded))


def _load(term: RewardTerm) -> tuple[Callable[..., Any], str]:
    """Return the callable, and its name in failures."""
    setting = f"reward.functions.{term.name}" if term.name else "reward.function"
    function = load_function(term.function, setting)
    args = f"{setting}.args" if term.name else "reward.args"
    if not term.model and not inspect.isclass(function):
        bound = bind(function, term.args, term.function, args)
        made = _make(bound, (), term) if _makes_another(bound) else None
        return made if callable(made) else bound, term.function
    given = (term.model,) if term.model else ()
    made = _make(bind(function, term.args, term.function, args, filled=given), given, term)
    name = f"{term.function} of {term.model}" if term.model else term.function
    if not callable(made):
        of = f" of reward.model={term.model}" if term.model else ""
        raise ConfigError(f"{term.function} created a {type(made).__name__}{of}, which cannot be called")
    return made, name


def _makes_another(function: Callable[..., Any]) -> bool:
    """Whether it makes the reward, as TRL's `get_soft_overlong_punishment` does: it needs nothing more, takes nothing
    that a completion supplies, and has no place for a completion and a row, or says that it returns a callable."""
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    starred = any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters)
    needs = any(each.default is each.empty for each in parameters)
    if starred or needs or signature.parameters.keys() & SUPPLIED or inspect.iscoroutinefunction(function):
        return False
    return len(positional) < 2 or "Callable" in str(signature.return_annotation)


def bind(
    function: Callable[..., Any], values: dict[str, Any], name: str, setting: str, filled: Sequence[Any] = ()
) -> Callable[..., Any]:
    """Return `function` with `values` as keyword arguments. Raises ConfigError for an argument that it does not
    have."""
    if not values:
        return function
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    free = [each.name for each in named if each.name not in SUPPLIED or inspect.isclass(function)][len(filled) :]
    unknown = [key for key in values if key not in free and (not takes_any or key in SUPPLIED)]
    if unknown:
        takes = f"It takes {', '.join(free)}" if free else "It takes none"
        raise ConfigError(f"{setting}.{unknown[0]}: {name}{signature} takes no such argument. {takes}")
    return functools.partial(function, **values)


def _make(function: Callable[..., Any], given: tuple[str, ...], term: RewardTerm) -> Any:
    try:
        return function(*given)
    except AsyncRLError:
        raise
    except Exception as error:  # user code at a process boundary: any exception refuses one setting
        why = f"{type(error).__name__}: {error}"
        what = f" with reward.model={term.model}" if term.model else ""
        raise ConfigError(f"making {term.function}{what} failed: {why}") from error


def settle(returned: Any) -> Any:
    """Return the result of a plain or an async function."""
    if inspect.isawaitable(returned):
        return asyncio.run(_wait(returned))
    return returned


async def _wait(awaitable: Any) -> Any:
    return await awaitable
