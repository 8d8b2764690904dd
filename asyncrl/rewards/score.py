"""Defines a reward: one finite number, and optionally named components. Everything else is an error.

An error concerns one completion if its function was called for that one, otherwise the whole group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import RewardError

LARGEST = 1e15
"""Limit on the size of a reward. The learner squares differences of rewards in float32: above 1.8e19 a whole batch
becomes NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardScore:
    value: float
    parts: dict[str, float] = field(default_factory=dict)
    """Further numbers that the function returned besides `score`, by name."""
    turns: tuple[float, ...] = ()
    """Part of `value` that each turn of the policy earned; empty if not reported. The last turn earned the rest."""


Outcome = RewardScore | RewardError
"""Result for one completion: its score, or why it has none."""


class NotApplicable(RewardError):
    """A TRL function returned `None`: it does not apply to this completion, while others may."""

    def __init__(self, function: str) -> None:
        super().__init__(
            f"{function} returned None (it does not apply here), and no other reward applies. Return one number per "
            "completion, or add a function that applies",
            "no_number",
        )


def to_score(returned: Any, function: str) -> RewardScore:
    """Convert a number, or a dict with `score` and other entries: numeric ones become named parts, a list `turns` the
    rewards of the policy's turns, and the rest is ignored.

    Raises:
        RewardError: None, NaN, infinite, above LARGEST or not a number. Never a silent 0: the model would be trained
            on it.
    """
    if not isinstance(returned, dict):
        return RewardScore(value=finite(returned, function))
    if "score" not in returned:
        keys = sorted(map(str, returned))
        raise RewardError(f"{function} returned a dict without `score` (keys: {keys}). Add it", "no_number")
    parts = {
        str(name): finite(entry, f"{function}[{name!r}]")
        for name, entry in returned.items()
        if name != "score" and _is_number(entry)
    }
    turns = returned.get("turns", ())
    turns = turns.tolist() if hasattr(turns, "tolist") and not _is_number(turns) else turns
    earned = tuple(finite(each, f"{function}['turns']") for each in turns) if isinstance(turns, list | tuple) else ()
    return RewardScore(value=finite(returned["score"], function), parts=parts, turns=earned)


def with_turns(outcome: Outcome, turns: int) -> Outcome:
    """Return `outcome`, or a RewardError if it has rewards of another number of turns."""
    if isinstance(outcome, RewardError) or len(outcome.turns) in (0, turns):
        return outcome
    return RewardError(
        f"the reward returned `turns` for {len(outcome.turns)} turns, but the environment reported {turns}: return one "
        "number for each entry of the argument `turns`",
        "no_number",
    )


def _is_number(value: Any) -> bool:
    """Whether it is a Python or numpy number, or a 0-d array or tensor; not text that looks like one."""
    return hasattr(value, "__float__") and not isinstance(value, str | bytes)


def finite(value: Any, function: str) -> float:
    """Raises RewardError: it is not a number, not finite, or too large to train on."""
    if not _is_number(value):
        raise RewardError(
            f"{function} returned {value!r:.80}. Return one number per completion, or a dict with `score`", "no_number"
        )
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"{function} returned {number}. Return a finite number", "no_number")
    if abs(number) > LARGEST:
        raise RewardError(
            f"{function} returned {number:g}. The learner computes in float32: return at most {LARGEST:g} in size",
            "no_number",
        )
    return number
