"""The environment seam: turns one prompt into scored trajectories. It knows neither where generation runs nor where
rewards do; both reach it as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.base import Chat
from asyncrl.errors import AsyncRLError
from asyncrl.rewards.score import Outcome
from asyncrl.types import Completion, Prompt, Trajectory, members_of


class Generate(Protocol):
    async def __call__(
        self,
        token_ids: NDArray[np.int32],
        n: int = 1,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str | int] = (),
        temperature: float | None = None,
    ) -> list[Completion]:
        """`n` completions of the token ids so far [P].

        Args:
            max_tokens: of each, at most; never above `rollout.max_new_tokens`, and fewer where the context ends.
            stop: texts or token ids that end a completion, besides the end of a turn; they are its end, and in it.
            temperature: another than the run's. What is sampled so is read and never trained on: it goes into a
                `Transcript` as an observation.

        Raises:
            ContextFullError: there is no room for a single token.
            GenerationError: the engine could not produce any.
        """
        ...


class Decode(Protocol):
    def __call__(self, sequences: Sequence[NDArray[np.int32]], *, special: bool = False) -> list[str]:
        """Texts of token sequences; special tokens are written out where `special` says so, and left out otherwise."""
        ...


Encode = Callable[[str], NDArray[np.int32]]
"""Token ids [N] of a text as it stands: no special tokens are added, those written out in it are understood."""


class Score(Protocol):
    async def __call__(
        self,
        completions: list[str],
        row: dict[str, Any],
        *,
        sampled: Sequence[Completion] | None = None,
        turns: Sequence[list[str]] | None = None,
    ) -> list[Outcome]:
        """Scores [G] of completions [G], a RewardError in the place of one that failed.

        Args:
            sampled: the same completions [G] as they were sampled, for rewards that look at token ids or their number.
            turns: all replies of the policy in each episode [G], for rewards that say what each turn earned.

        Raises:
            RewardError: none could be scored.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTools:
    """What an environment may call while it runs one group."""

    generate: Generate
    decode: Decode
    encode: Encode
    score: Score
    chat: Chat | None = None
    """Messages to ids and back."""
    timeout_s: float = 0.0
    """Longest that one episode may take; 0 is no bound. `ChatEnvironment` sees to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """The outcome for one prompt."""

    trajectories: tuple[Trajectory, ...]
    """[G] those that came to their end, each before its branches, where it has some (`Trajectory.branch`)."""
    texts: tuple[str, ...]
    """[G] what the policy wrote, decoded; for the sample table, never trained on."""
    failures: tuple[AsyncRLError, ...] = ()
    """Of the others: why. They are made again, or left out of the group."""
    own_prompts: bool = False
    """Whether trajectories begin with other tokens than the prompt's, all outside the loss: rendered with tools, or
    with a system's message."""

    @property
    def members(self) -> tuple[Trajectory, ...]:
        """The first trajectory of each episode."""
        return tuple(self.trajectories[place] for place in members_of(self.trajectories))


class Environment(Protocol):
    """One with `close()`, or `async def aclose()`, has it called when its worker ends: `close` on a thread
    of its own, which may block."""

    async def run(self, prompt: Prompt, size: int, tools: EpisodeTools) -> Episodes:
        """`size` sibling episodes of `prompt`, failures included. Sampled ids are kept as sampled, never tokenized
        again; each trajectory begins with the prompt's tokens (or see
        `Episodes.own_prompts`). Evaluations call it with a `size` of `eval.samples`.

        Raises:
            GenerationError: the engine could not produce any.
            RewardError: none could be scored.
            EpisodeError: of an environment of the user (`GuardedEnvironment`): whatever else went wrong.
        """
        ...
