"""The base of environments that talk: yours says what one episode is, in messages, and nothing about tokens."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.chat.base import ToolSpec
from asyncrl.environments.base import Episodes, EpisodeTools
from asyncrl.environments.conversation import Conversation, EpisodeOver
from asyncrl.environments.guard import causes
from asyncrl.environments.together import Together
from asyncrl.errors import AsyncRLError, EngineDiedError, EpisodeError, GenerationError, RewardError
from asyncrl.rewards.score import Outcome, RewardScore, to_score
from asyncrl.types import Prompt, Trajectory

Made = tuple[Conversation, RewardScore | None]
"""An episode that came to its end, and its score where it has one already."""


class ChatEnvironment(ABC):
    """Implements `environments.base.Environment`. Siblings run side by side; one that fails leaves the others alone."""

    several_turns = True
    """False where an episode is one reply: then any chat template will do."""
    reward_when_over: float | None = 0.0
    """Of an episode that could not go on (`EpisodeOver`); None asks `reward.function`."""

    @abstractmethod
    async def episode(self, chat: Conversation, row: dict[str, Any]) -> float | Mapping[str, float] | None:
        """One episode, from its first reply to its reward.

        Args:
            chat: begins with the row's messages.
            row: of the data file.

        Returns:
            The reward, or a dictionary with `score` and named parts; None to have `reward.function` score the last
            reply.
        """

    def specs(self, row: dict[str, Any]) -> Sequence[ToolSpec]:
        """Functions that the policy is told of."""
        return ()

    async def run(self, prompt: Prompt, size: int, tools: EpisodeTools) -> Episodes:
        if tools.chat is None:
            raise EpisodeError("there is no chat: the tokenizer was not given one")
        engine = Together(tools.generate)
        try:
            async with asyncio.TaskGroup() as together:
                tasks = [together.create_task(self._member(prompt, tools, engine)) for _ in range(size)]
        finally:
            engine.close()
        outcomes = await self._scored([task.result() for task in tasks], prompt, tools)
        made = [each for each in outcomes if not isinstance(each, AsyncRLError)]
        return Episodes(
            trajectories=tuple(trajectory for trajectory, _ in made),
            texts=tuple(text for _, text in made),
            failures=tuple(each for each in outcomes if isinstance(each, AsyncRLError)),
            own_prompts=True,
        )

    async def _member(self, prompt: Prompt, tools: EpisodeTools, engine: Together) -> Made | AsyncRLError:
        """Its outcome, or why it has none."""
        row = dict(prompt.columns)
        chat = Conversation(prompt, tools, engine, self.specs(row))
        try:
            async with asyncio.timeout(tools.timeout_s or None):
                score = await self._episode(chat, row)
        except TimeoutError:
            return EpisodeError(f"the episode took longer than {tools.timeout_s:g} s, or something that it waited for")
        # User code: whatever it raises fails this episode. Its siblings are made, and it is made again.
        except Exception as error:
            return _failure(error)
        if not chat.sampled:
            return EpisodeError("the episode ended without a reply that can be trained on")
        return chat, score

    async def _episode(self, chat: Conversation, row: dict[str, Any]) -> RewardScore | None:
        try:
            reward = await self.episode(chat, row)
        except EpisodeOver:
            reward = self.reward_when_over
        return None if reward is None else to_score(reward, "the environment")

    async def _scored(
        self, outcomes: list[Made | AsyncRLError], prompt: Prompt, tools: EpisodeTools
    ) -> list[tuple[Trajectory, str] | AsyncRLError]:
        """With the scores of those that ask for them, in one call: a group's rewards run side by side."""
        ended = [each for each in outcomes if not isinstance(each, AsyncRLError)]
        asking = [chat.last_text for chat, score in ended if score is None]
        scores = iter(await tools.score(asking, prompt.columns) if asking else [])
        made: list[tuple[Trajectory, str] | AsyncRLError] = []
        for each in outcomes:
            if isinstance(each, AsyncRLError):
                made.append(each)
                continue
            chat, score = each
            outcome: Outcome = next(scores) if score is None else score
            made.append(outcome if isinstance(outcome, RewardError) else (chat.trajectory(outcome), chat.text))
        return made


def _failure(error: Exception) -> AsyncRLError:
    """What an episode failed of, also where it was raised in an `asyncio.TaskGroup`.

    Raises:
        EngineDiedError: nothing can be made any more.
    """
    found = list(causes(error))
    died = next((each for each in found if isinstance(each, EngineDiedError)), None)
    if died is not None:
        raise died
    known = next((each for each in found if isinstance(each, GenerationError | RewardError | EpisodeError)), None)
    if known is not None:
        return known
    first = next((each for each in found if not isinstance(each, BaseExceptionGroup)), error)
    return EpisodeError(f"{type(first).__name__}: {first}")
