"""Environment interface: turns one prompt into scored trajectories. An environment does not know where generation or
rewards run; it is given both as functions."""

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
        """Return `n` completions of the token ids so far [P].

        Args:
            max_tokens: limit for each; never above `rollout.max_new_tokens`, and lower near the end of the context.
            stop: texts or token ids that end a completion, besides the end of a turn; they are kept as its end.
            temperature: a temperature other than the run's. Such completions are read but never trained on: they go
                into a `Transcript` as observations.

        Raises:
            ContextFullError: there is no space for a single token.
            GenerationError: the engine could not produce any completion.
        """
        ...


class Decode(Protocol):
    def __call__(self, sequences: Sequence[NDArray[np.int32]], *, special: bool = False) -> list[str]:
        """Texts of token sequences; `special` includes special tokens, which are left out otherwise."""
        ...


Encode = Callable[[str], NDArray[np.int32]]
"""Token ids [N] of a text exactly as it is: no special tokens are added, and those written in it are recognised."""


class Score(Protocol):
    async def __call__(
        self,
        completions: list[str],
        row: dict[str, Any],
        *,
        sampled: Sequence[Completion] | None = None,
        turns: Sequence[list[str]] | None = None,
    ) -> list[Outcome]:
        """Return the scores [G] of completions [G], with a RewardError in place of each that failed.

        Args:
            sampled: the same completions [G] as they were sampled, for rewards that use token ids or their number.
            turns: all replies of the policy in each episode [G], for rewards that report what each turn earned.

        Raises:
            RewardError: none could be scored.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTools:
    """Functions that an environment may call while it runs one group."""

    generate: Generate
    decode: Decode
    encode: Encode
    score: Score
    chat: Chat | None = None
    """Converts messages to ids and back."""
    timeout_s: float = 0.0
    """Longest time in seconds that one episode may take; 0 is no limit. Enforced by `ChatEnvironment`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """The outcome for one prompt."""

    trajectories: tuple[Trajectory, ...]
    """[G] the finished trajectories, each followed by its branches, if it has any (`Trajectory.branch`)."""
    texts: tuple[str, ...]
    """[G] decoded text of the policy; for the sample table, never trained on."""
    failures: tuple[AsyncRLError, ...] = ()
    """Reasons why the other episodes failed. They are made again, or left out of the group."""
    prompt_text: str = ""
    """The first request of the first episode, decoded with special tokens, which may have tools, a system message or an
    observation besides the row's prompt; empty if there was none. Set by who runs the environment."""
    own_prompts: bool = False
    """Whether trajectories start with other tokens than the prompt's, all outside the loss: rendered with tools, or
    with a system message."""

    @property
    def members(self) -> tuple[Trajectory, ...]:
        """The first trajectory of each episode."""
        return tuple(self.trajectories[place] for place in members_of(self.trajectories))


class Environment(Protocol):
    """An environment. If it has `close()` or `async def aclose()`, that is called when its worker ends; `close` runs on
    its own thread, and may block."""

    async def run(self, prompt: Prompt, size: int, tools: EpisodeTools) -> Episodes:
        """Run `size` sibling episodes of `prompt`, including failures. Sampled ids are kept as sampled, never tokenized
        again; each trajectory starts with the prompt's tokens (or see `Episodes.own_prompts`). Evaluations call it with
        a `size` of `eval.samples`.

        Raises:
            GenerationError: the engine could not produce any completion.
            RewardError: none could be scored.
            EpisodeError: from a user's environment (`GuardedEnvironment`): anything else that went wrong.
        """
        ...
