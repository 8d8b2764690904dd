"""Filters by path: a user's function that decides whether a finished group is worth training on.

    def keep(group) -> bool | str

`True` keeps the group, `False` drops it, and a text drops it for that reason. `group` is a `FinishedGroup`. The
function runs like reward functions, in its own process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import ConfigError, FilterError
from asyncrl.rewards.loader import settle
from asyncrl.user_code import load_function

SETTING = "rollout.filters"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """The argument of a filter. Lists are `[G]`, one entry per completion, in the same order."""

    completions: list[str]
    rewards: list[float]
    parts: list[dict[str, float]]
    """The named numbers that the reward function returned besides `score`."""
    finish_reasons: list[str]
    """`stop`, or `length` if the completion was cut at `rollout.max_new_tokens`."""
    lengths: list[int]
    """Numbers of sampled tokens."""
    row: dict[str, Any]
    """Row of the data file, including `prompt`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    keep: bool
    why: str = ""
    """Reason for a drop, if the function gave one."""


def filter_name(spec: str) -> str:
    """Return `keep` of `my_filters.py:keep`: the name that its drops are counted under."""
    return spec.rpartition(":")[2]


def make_filter(spec: str) -> Callable[[FinishedGroup], Verdict]:
    """Return the filter that `spec` names.

    Raises:
        ConfigError: it cannot be loaded, or not called with one argument. The filter itself raises FilterError if the
            function raises, or returns anything but true, false or a reason.
    """
    function = load_function(spec, SETTING)
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{SETTING}={spec!r} cannot be called as f(group): {error}") from error

    def judge(group: FinishedGroup) -> Verdict:
        try:
            return to_verdict(settle(function(group)), spec)
        except FilterError:
            raise
        except Exception as error:  # user code at a process boundary: its failure is an answer
            raise FilterError(f"{type(error).__name__}: {error}") from error

    return judge


def to_verdict(returned: Any, name: str) -> Verdict:
    """Raises FilterError for a value that is neither true, false nor a reason: a forgotten `return` must not keep or
    drop."""
    if isinstance(returned, str) and returned:
        return Verdict(False, returned)
    if type(returned).__name__ in ("bool", "bool_"):  # Python's and numpy's
        return Verdict(bool(returned))
    raise FilterError(
        f"{name} returned {returned!r:.80}. Return True to keep the group, or False or a reason (text) to drop it"
    )
