"""Resolves the settings of rewards: one function, or several with weights, each for certain rows."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from asyncrl.checks.hints import nearest, refuse_others
from asyncrl.errors import ConfigError
from asyncrl.schema import Config, RewardConfig

LIBRARY = {
    "exact_match": "asyncrl.rewards.exact_match:exact_match",
    **{
        name: f"asyncrl.rewards.library.{place}"
        for name, place in {
            "gsm8k": "gsm8k:gsm8k",
            "math": "math_verified:MathVerified",
            "math_dapo": "math_dapo:math_dapo",
            "qa_exact_match": "question_answering:qa_exact_match",
            "f1": "question_answering:f1",
            "choice": "choice:choice",
            "format": "layout:Format",
            "overlong": "overlong:Overlong",
            "code": "code:Code",
            "llm_judge": "llm_judge:LlmJudge",
            "remote": "remote:Remote",
        }.items()
    },
    "reward_model": "asyncrl.rewards.reward_model:RewardModel",
}
"""Built-in rewards, by their names in `reward.function`."""
MODEL_REWARD = LIBRARY["reward_model"]
EXTRAS = {
    LIBRARY["math"]: ("math_verify", "math"),
    LIBRARY["llm_judge"]: ("httpx", "judge"),
    LIBRARY["remote"]: ("httpx", "judge"),
}
"""Built-in rewards that need a package: its module, and the extra that installs it."""
REMOTE = (LIBRARY["llm_judge"], LIBRARY["remote"])
"""Built-in rewards that need a network."""
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
"""Suffixes of the class names of models whose output can be a reward."""
AT_ONCE = 64
"""Limit on concurrent async calls in one reward process, if `reward.concurrency` is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTerm:
    """One of the functions that make up a reward."""

    name: str = ""
    """Name under which its value is logged, `rewards/<name>`; empty for that of `reward.function`."""
    function: str
    """`file.py:name` or `package.module:name`."""
    weight: float = 1.0
    args: dict[str, Any] = field(default_factory=dict)
    data_source: tuple[str, ...] = ()
    """Values of `data_source` of the rows to which it applies; empty for all rows."""
    model: str = ""

    @property
    def room(self) -> str:
        """The setting under which those of this term are."""
        return f"reward.functions.{self.name}" if self.name else "reward"

    @property
    def said(self) -> str:
        """In words: its name, if it has one, and its function."""
        return f"{self.name}: {self.function}" if self.name else self.function

    @property
    def remote(self) -> bool:
        """Whether it calls another service, so that it must not be tried before the start."""
        return self.function in REMOTE

    def covers(self, row: Mapping[str, Any]) -> bool:
        return not self.data_source or row.get("data_source") in self.data_source


def reward_terms(reward: RewardConfig) -> tuple[RewardTerm, ...]:
    """Return the terms of `reward.function` or `reward.functions`; empty if neither is set.

    Raises:
        ConfigError: both are set, or an entry of `functions` is invalid.
    """
    if not reward.functions:
        model, args = reward.model, dict(reward.args)
        return (RewardTerm(function=full_name(reward.function), args=args, model=model),) if reward.function else ()
    if reward.function:
        raise ConfigError(
            f"reward.function={reward.function} and reward.functions contradict each other: set one function or "
            "several. Remove one of them (reward.function= removes it)"
        )
    if reward.args or reward.model:
        raise ConfigError(
            "reward.args and reward.model belong to reward.function. Set those of each of reward.functions there: "
            "reward.functions.NAME.args"
        )
    return tuple(_term(str(name), entry) for name, entry in reward.functions.items())


def _term(name: str, entry: Any) -> RewardTerm:
    key = f"reward.functions.{name}"
    values = {"function": entry} if isinstance(entry, str) else entry
    known = [item.name for item in fields(RewardTerm) if item.name != "name"]
    if not isinstance(values, Mapping) or not isinstance(values.get("function"), str):
        raise ConfigError(f"{key}={entry!r} does not name a function. Write {key}.function=NAME, or file.py:name")
    refuse_others(key, values, known)
    weight, args, sources = values.get("weight", 1.0), values.get("args") or {}, values.get("data_source") or ()
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"{key}.weight must be a number; got {weight!r}")
    if not isinstance(args, Mapping):
        raise ConfigError(f"{key}.args must be a mapping, {key}.args.NAME=VALUE; got {args!r}")
    return RewardTerm(
        name=name,
        function=full_name(values["function"], f"{key}.function"),
        weight=float(weight),
        args=dict(args),
        data_source=(sources,) if isinstance(sources, str) else tuple(map(str, sources)),
        model=str(values.get("model") or ""),
    )


def compared_parts(config: Config) -> tuple[str, ...]:
    """Return the parts of the reward that `rollout.drop_zero_variance` compares; empty for the reward itself.

    DAPO filters by accuracy and adds its penalty for length afterwards. By the total, a group whose answers are all
    wrong would be kept if their lengths differ, and a baseline with a standard deviation would make full advantages of
    the penalty.
    """
    if config.rollout.zero_variance_of:
        return (config.rollout.zero_variance_of,)
    terms = reward_terms(config.reward)
    others = tuple(term.name for term in terms if term.function != LIBRARY["overlong"])
    return others if len(others) < len(terms) else ()


def full_name(function: str, key: str = "reward.function") -> str:
    """Return the path of a built-in reward, or a path unchanged. Raises ConfigError for a name that is neither."""
    if ":" in function:
        return function
    if function not in LIBRARY:
        hint = nearest(function, LIBRARY)
        raise ConfigError(
            f"{key} must be file.py:name or package.module:name, or one of {', '.join(LIBRARY)}; "
            f"got {function!r}.{hint}"
        )
    return LIBRARY[function]


def at_once(reward: RewardConfig) -> int:
    """Return the limit on concurrent async calls in one reward process: each program of `code` needs a core."""
    programs = any(term.function == LIBRARY["code"] for term in reward_terms(reward))
    return reward.concurrency or (os.cpu_count() or 1 if programs else AT_ONCE)


def not_one_number(architectures: Sequence[str], labels: int) -> str:
    """Return why the output of a reward model is not one number; empty if it is."""
    if not any(name.endswith(CLASSIFIERS) for name in architectures):
        return (
            f"is a {', '.join(architectures) or 'model of unknown kind'}, whose output is not a reward. Give a "
            "...ForSequenceClassification or ...ForTokenClassification with num_labels=1"
        )
    if labels != 1:
        return (
            f"has num_labels={labels}, but a reward is one number. Give a model with num_labels=1, or write a "
            "reward.function that turns its outputs into one number"
        )
    return ""
