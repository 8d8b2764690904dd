"""One call of a reward: the completions of a group, and what is known of them. And the clock that bounds it."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.score import Outcome

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Lists are [G], one entry per completion."""

    completions: list[str]
    row: Row
    packed_ids: list[bytes] | None = None
    """Sampled token ids, int32; None where the environment told none."""
    finish_reasons: list[str] | None = None
    """`stop` or `length`."""
    turns: list[list[str]] | None = None
    """Every reply of the policy, the last included; None where the environment told none."""

    @property
    def completion_ids(self) -> list[list[int]]:
        """Raises RewardError: unknown here."""
        return [array("i", packed).tolist() for packed in self._told(self.packed_ids, "completion_ids")]

    def of_each(self, name: str) -> list[Any]:
        """What a function asks for by `name`, per completion. Raises RewardError: unknown here."""
        if name == "completion_ids":
            return self.completion_ids
        if name == "finish_reason":
            return self._told(self.finish_reasons, name)
        # What was sampled at once is one turn.
        one_each = None if self.packed_ids is None else [[text] for text in self.completions]
        return self._told(self.turns or one_each, name)

    def _told(self, values: list[Any] | None, name: str) -> list[Any]:
        if values is None:
            raise RewardError(
                f"the reward asks for {name}, and the environment told none with the completions. Have it call "
                "tools.score(texts, row, sampled=completions, turns=replies)"
            )
        return values


PER_COMPLETION = ("completion_ids", "finish_reason", "turns")
"""Parameters beside completion and row that a function may name."""

GroupReward = Callable[[Call], "list[Outcome] | Awaitable[list[Outcome]]"]
"""Scores or failures [G], or what gives them when awaited: what every form of function is adapted to."""


@dataclass(frozen=True, slots=True)
class CallClock:
    """The deadline of each call of a reward, and who is told when one begins."""

    timeout_s: float
    begin: Callable[[int], None]
    """With the place of the completion in its group, or TOGETHER."""
    watch: Callable[[int, Awaitable[Any]], Awaitable[Any]] = field(default=lambda place, awaitable: awaitable)
    """Around what is awaited: tells at each of its steps whose it is."""
    slots: asyncio.Semaphore | None = None
    """How many may be awaited side by side; the deadline of one begins when it has a slot."""
    left: set[asyncio.Future[Any]] = field(default_factory=set)
    """What was not to be cancelled at its deadline, and goes on although nobody waits for it."""


UNTIMED = CallClock(math.inf, lambda _: None)


def failed(error: Exception) -> RewardError:
    return error if isinstance(error, RewardError) else RewardError(f"{type(error).__name__}: {error}")
