"""The environment seam: turns one prompt into scored trajectories. It knows neither where generation runs nor where
rewards do; both reach it as functions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import AsyncRLError
from asyncrl.rewards.score import Outcome
from asyncrl.types import Completion, Prompt, Trajectory

Generate = Callable[[NDArray[np.int32], int], Awaitable[list[Completion]]]
"""`(token ids so far [P], n) -> n completions`; may raise GenerationError."""
Decode = Callable[[Sequence[NDArray[np.int32]]], list[str]]
"""Texts of token sequences, special tokens left out."""
Encode = Callable[[str], NDArray[np.int32]]
"""Token ids [N] of a text as it stands: no special tokens are added, those written out in it are understood."""
Score = Callable[[list[str], dict[str, Any]], Awaitable[list[Outcome]]]
"""`(completions [G], row) -> scores [G]`, a RewardError in the place of one that failed; may raise RewardError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTools:
    """What an environment may call while it runs one group."""

    generate: Generate
    decode: Decode
    encode: Encode
    score: Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """The outcome for one prompt."""

    trajectories: tuple[Trajectory, ...]
    """[G] those that came to their end."""
    texts: tuple[str, ...]
    """[G] what the policy wrote, decoded; for the sample table, never trained on."""
    failures: tuple[AsyncRLError, ...] = ()
    """Of the others: why. They are made again, or left out of the group."""


class Environment(Protocol):
    async def run(self, prompt: Prompt, size: int, tools: EpisodeTools) -> Episodes:
        """`size` sibling episodes of `prompt`, failures included. Sampled ids are kept as sampled, never tokenized
        again; each trajectory begins with the prompt's tokens. Evaluations call it with a `size` of 1.

        Raises:
            GenerationError: the engine could not produce any.
            RewardError: none could be scored.
            EpisodeError: of an environment of the user (`GuardedEnvironment`): whatever else went wrong.
        """
        ...
