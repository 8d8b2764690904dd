"""Base class of environments that run one episode at a time: handles concurrent siblings, deadlines, failures and
scores."""

from __future__ import annotations

import asyncio
import inspect
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
from asyncrl.user_code import described


class EpisodeOver(Exception):
    """The conversation cannot continue: its context is full, or the last turn ended within its reasoning.

    It need not be caught: the episode then gets `reward_when_over`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Requirements of an environment on the model's chat."""

    several: bool
    """Several turns. An episode of one reply works with any chat template."""
    calls: bool = False
    """Tool calls, in the form of the chat template..."""
    told: bool = False
    """... which must also describe the tools to the policy."""


class Record(Protocol):
    """Record of an episode."""

    @property
    def sampled(self) -> bool:
        """Whether there is a token to train on."""
        ...

    @property
    def last_text(self) -> str:
        """Text passed to `reward.function`, if it is used."""
        ...

    @property
    def turns(self) -> list[str]:
        """All replies, for a reward that reports what each earned; empty if they are not one sequence."""
        ...

    def made(self, score: RewardScore) -> list[tuple[Trajectory, str]]:
        """Its trajectories, the first and then its branches, each with the policy's text."""
        ...


R = TypeVar("R", bound=Record)
Made = tuple[R, RewardScore | None]
"""An episode that finished, and its score if it has one already."""


class EpisodeEnvironment(ABC, Generic[R]):
    """Implements `environments.base.Environment`. Siblings run concurrently; a failure does not affect the others."""

    several_turns = True
    """False if an episode is one reply: any chat template works then."""
    reward_when_over: float | None = 0.0
    """Reward of an episode that could not continue (`EpisodeOver`); None uses `reward.function`."""

    @property
    def asked(self) -> Asked:
        return Asked(several=self.several_turns)

    @classmethod
    def check(cls, **args: Any) -> Asked:
        """Check a built-in environment before a start, in a separate process, by creating one. Returns the requirements
        on the chat. Raises ConfigError."""
        return cls(**args).asked

    @abstractmethod
    def open(self, prompt: Prompt, tools: EpisodeTools, engine: Together) -> R:
        """Return the record of one episode. `tools.chat` is set."""

    @abstractmethod
    async def episode(self, chat: R, row: dict[str, Any]) -> float | Mapping[str, float] | None:
        """One episode, from its first reply to its reward.

        Args:
            chat: its record.
            row: row of the data file.

        Returns:
            The reward, or a dictionary with `score` and named parts; None to have `reward.function` score the last
            reply.
        """

    async def run(self, prompt: Prompt, size: int, tools: EpisodeTools) -> Episodes:
        if tools.chat is None:
            raise EpisodeError("there is no chat: EpisodeTools was made without one")
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
        """Run one episode; returns its outcome, or why it failed."""
        chat = self.open(prompt, tools, engine)
        try:
            async with asyncio.timeout(tools.timeout_s or None):
                score, over = await self._episode(chat, dict(prompt.columns))
        except TimeoutError:
            return EpisodeError(f"the episode, or something that it waited for, took longer than {tools.timeout_s:g} s")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return EpisodeError("a task that the episode waited for was cancelled")
        except (KeyboardInterrupt, GeneratorExit):
            raise
        # User code: any exception fails this episode. Its siblings continue, and it is made again. A SystemExit that
        # leaves a task would end the worker, and then the next one.
        except BaseException as error:
            return _failure(error)
        if not chat.sampled:
            return EpisodeError(f"the episode ended without a reply that can be trained on{over}")
        return chat, score

    async def _episode(self, chat: R, row: dict[str, Any]) -> tuple[RewardScore | None, str]:
        """Run one episode; returns its score, if it has one, and why it could not continue."""
        over = ""
        try:
            playing = self.episode(chat, row)
            if not inspect.isawaitable(playing):
                raise EpisodeError(f"{type(self).__name__}.episode is not async. Define it with `async def`")
            reward = await playing
        except EpisodeOver as error:
            reward, over = self.reward_when_over, f": {error}"
        return None if reward is None else to_score(reward, "the environment"), over

    async def _scored(
        self, outcomes: list[Made[R] | AsyncRLError], prompt: Prompt, tools: EpisodeTools
    ) -> list[list[tuple[Trajectory, str]] | AsyncRLError]:
        """Add the scores of `reward.function` where needed, in one call, so that a group's rewards run concurrently."""
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
    """Return the reason why an episode failed, also if it was raised in an `asyncio.TaskGroup`.

    Raises:
        EngineDiedError: the engine died, so nothing more can be generated.
    """
    found = list(causes(error))
    died = next((each for each in found if isinstance(each, EngineDiedError)), None)
    if died is not None:
        raise died
    known = next((each for each in found if isinstance(each, GenerationError | RewardError | EpisodeError)), None)
    if known is not None:
        return known
    first = next((each for each in found if not isinstance(each, BaseExceptionGroup)), error)
    return EpisodeError(described(first))
