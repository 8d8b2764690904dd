"""The base of environments that make one episode at a time: siblings side by side, a deadline, failures, scores."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from asyncrl.environments.base import Episodes, EpisodeTools
from asyncrl.environments.guard import causes
from asyncrl.environments.together import Together
from asyncrl.errors import AsyncRLError, EngineDiedError, EpisodeError, GenerationError, RewardError
from asyncrl.rewards.score import Outcome, RewardScore, to_score, with_turns
from asyncrl.types import Prompt, Trajectory


class EpisodeOver(Exception):
    """The conversation cannot go on: its context is full, or the last turn ended within its reasoning.

    It need not be caught: the episode then has `reward_when_over`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Of the model's chat, by an environment."""

    several: bool
    """Turns. Where an episode is one reply any chat template will do."""
    calls: bool = False
    """Of tools, in the form of the chat template..."""
    told: bool = False
    """... which is to tell the policy of them."""


class Record(Protocol):
    """What an episode leaves behind."""

    @property
    def sampled(self) -> bool:
        """Whether there is a token to train on."""
        ...

    @property
    def last_text(self) -> str:
        """What `reward.function` is given, where it is asked."""
        ...

    @property
    def turns(self) -> list[str]:
        """All replies, for a reward that says what each earned; none where they are no sequence."""
        ...

    def made(self, score: RewardScore) -> list[tuple[Trajectory, str]]:
        """Its trajectories, each with what the policy wrote there: the first, then its branches."""
        ...


R = TypeVar("R", bound=Record)
Made = tuple[R, RewardScore | None]
"""An episode that came to its end, and its score where it has one already."""


class EpisodeEnvironment(ABC, Generic[R]):
    """Implements `environments.base.Environment`. Siblings run side by side; one that fails leaves the others alone."""

    several_turns = True
    """False where an episode is one reply: then any chat template will do."""
    reward_when_over: float | None = 0.0
    """Of an episode that could not go on (`EpisodeOver`); None asks `reward.function`."""

    @property
    def asked(self) -> Asked:
        return Asked(several=self.several_turns)

    @abstractmethod
    def open(self, prompt: Prompt, tools: EpisodeTools, engine: Together) -> R:
        """What one episode is recorded in. `tools.chat` is there."""

    @abstractmethod
    async def episode(self, chat: R, row: dict[str, Any]) -> float | Mapping[str, float] | None:
        """One episode, from its first reply to its reward.

        Args:
            chat: its record.
            row: of the data file.

        Returns:
            The reward, or a dictionary with `score` and named parts; None to have `reward.function` score the last
            reply.
        """

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
        made = [pair for each in outcomes if not isinstance(each, AsyncRLError) for pair in each]
        return Episodes(
            trajectories=tuple(trajectory for trajectory, _ in made),
            texts=tuple(text for _, text in made),
            failures=tuple(each for each in outcomes if isinstance(each, AsyncRLError)),
            own_prompts=True,
        )

    async def _member(self, prompt: Prompt, tools: EpisodeTools, engine: Together) -> Made[R] | AsyncRLError:
        """Its outcome, or why it has none."""
        chat = self.open(prompt, tools, engine)
        try:
            async with asyncio.timeout(tools.timeout_s or None):
                score, over = await self._episode(chat, dict(prompt.columns))
        except TimeoutError:
            return EpisodeError(f"the episode took longer than {tools.timeout_s:g} s, or something that it waited for")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return EpisodeError("a task that the episode waited for was cancelled")
        except (KeyboardInterrupt, GeneratorExit):
            raise
        # User code: whatever it raises fails this episode. Its siblings are made, and it is made again. A SystemExit
        # that leaves a task ends the worker, and the next one likewise.
        except BaseException as error:
            return _failure(error)
        if not chat.sampled:
            return EpisodeError(f"the episode ended without a reply that can be trained on{over}")
        return chat, score

    async def _episode(self, chat: R, row: dict[str, Any]) -> tuple[RewardScore | None, str]:
        """Its score, where it has one, and why it could not go on."""
        over = ""
        try:
            reward = await self.episode(chat, row)
        except EpisodeOver as error:
            reward, over = self.reward_when_over, f": {error}"
        return None if reward is None else to_score(reward, "the environment"), over

    async def _scored(
        self, outcomes: list[Made[R] | AsyncRLError], prompt: Prompt, tools: EpisodeTools
    ) -> list[list[tuple[Trajectory, str]] | AsyncRLError]:
        """With the scores of those that ask for them, in one call: a group's rewards run side by side."""
        ended = [each for each in outcomes if not isinstance(each, AsyncRLError)]
        asking = [chat for chat, score in ended if score is None]
        texts, turns = [chat.last_text for chat in asking], [chat.turns for chat in asking]
        told = turns if all(turns) else None
        scores = iter(await tools.score(texts, prompt.columns, turns=told) if asking else [])
        made: list[list[tuple[Trajectory, str]] | AsyncRLError] = []
        for each in outcomes:
            if isinstance(each, AsyncRLError):
                made.append(each)
                continue
            chat, score = each
            outcome: Outcome = next(scores) if score is None else score
            if isinstance(outcome, RewardScore) and outcome.turns:
                outcome = with_turns(outcome, len(chat.turns))
            made.append(outcome if isinstance(outcome, RewardError) else chat.made(outcome))
        return made


def _failure(error: BaseException) -> AsyncRLError:
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
