"""One call of a reward: the completions of a group and the data about them; and the clock that bounds it."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.score import Outcome
from asyncrl.user_code import described

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Arguments of one call. Lists are [G], one entry per completion."""

    completions: list[str]
    row: Row
    packed_ids: list[bytes] | None = None
    """Sampled token ids, int32; None if the environment passed none."""
    finish_reasons: list[str] | None = None
    """`stop` or `length`."""
    turns: list[list[str]] | None = None
    """Every reply of the policy, including the last; None if the environment passed none."""

    @property
    def completion_ids(self) -> list[list[int]]:
        """Raises RewardError: the environment passed no token ids."""
        return [array("i", packed).tolist() for packed in self._told(self.packed_ids, "completion_ids")]

    def of_each(self, name: str) -> list[Any]:
        """Values of the parameter `name`, per completion. Raises RewardError: the environment passed none."""
        if name == "completion_ids":
            return self.completion_ids
        if name == "finish_reason":
            return self._told(self.finish_reasons, name)
        # A completion sampled in one piece is one turn.
        one_each = None if self.packed_ids is None else [[text] for text in self.completions]
        return self._told(self.turns or one_each, name)

    def _told(self, values: list[Any] | None, name: str) -> list[Any]:
        if values is None:
            raise RewardError(
                f"the reward needs {name}, but the environment passed none with the completions. The environment must "
                "call tools.score(texts, row, sampled=completions, turns=replies)"
            )
        return values


PER_COMPLETION = ("completion_ids", "finish_reason", "turns")
"""Parameters besides completion and row that a function may name."""

GroupReward = Callable[[Call], "list[Outcome] | Awaitable[list[Outcome]]"]
"""Returns scores or failures [G], or an awaitable of them; every form of function is adapted to this."""


@dataclass(frozen=True, slots=True)
class CallClock:
    """The deadline of each call of one function of a reward, and the callbacks that report its progress."""

    timeout_s: float
    begin: Callable[[int], None]
    """Called with the index of the completion in its group, or WHOLE, or TOGETHER, when scoring of it begins."""
    watch: Callable[[int, Awaitable[Any]], Awaitable[Any]] = field(default=lambda place, awaitable: awaitable)
    """Wraps what is awaited, to report at each of its steps which completion it belongs to."""
    slots: asyncio.Semaphore | None = None
    """Limits how many are awaited concurrently; the deadline of each starts once it has a slot."""
    left: set[asyncio.Future[Any]] = field(default_factory=set)
    """Calls that could not be cancelled at their deadline, and continue although nobody waits for them."""


UNTIMED = CallClock(math.inf, lambda _: None)


def failed(error: Exception) -> RewardError:
    return error if isinstance(error, RewardError) else RewardError(described(error))
