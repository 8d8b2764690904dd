"""One reward pool for all workers of a rollout pool: a Ray actor, so that a reward model is loaded once.

The Ray host starts it next to the workers. Its own processes compute the scores, so deadlines, crashes and errors are
handled as for any other reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from asyncrl.checks.rewards import at_once, reward_terms
from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.pool import MODEL_START_TIMEOUT_S, RewardPool
from asyncrl.rewards.score import Outcome, RewardScore
from asyncrl.rollout.assigned import see_own_gpus
from asyncrl.rollout.luggage import Luggage, unpacked
from asyncrl.schema import RewardConfig
from asyncrl.types import Completion

CONCURRENT_CALLS = 1000
"""Limit on the groups in the service at once; more wait in Ray."""
RESTARTS = 10
"""Restarts of the actor after its process was lost; calls made meanwhile wait for the next one."""

Scores = list[tuple[float, dict[str, float], tuple[float, ...]] | tuple[str, str]]
"""For each completion its score, components and rewards of turns; or the reason and message of its failure."""


class RewardService:
    """The Ray actor. Its methods run on one event loop."""

    def __init__(self, reward: dict[str, Any], environment: dict[str, str], luggage: Luggage) -> None:
        os.environ.update(luggage.environment | environment)
        see_own_gpus(or_none=True)  # a reward that takes a GPU where it sees one would take an engine's
        self._unpacked = contextlib.ExitStack()  # until this process ends
        settings = RewardConfig(**self._unpacked.enter_context(unpacked(luggage, {"reward": reward}))["reward"])
        terms = reward_terms(settings)
        self._make_pool = partial(
            RewardPool, terms, workers=settings.workers, timeout_s=settings.timeout_s, at_once=at_once(settings)
        )
        self._pool = self._make_pool()
        self._starting: asyncio.Task[None] | None = None

    async def ready(self) -> str:
        """Wait until the pool has started. Returns why it was refused; empty if it was not."""
        try:
            await self._started()
        except ConfigError as error:
            return str(error)
        return ""

    async def score(
        self,
        completions: list[str],
        row: dict[str, Any],
        sampled: Sequence[Completion] | None,
        turns: Sequence[list[str]] | None,
    ) -> Scores:
        await self._started()
        outcomes = await self._pool.score(completions, row, sampled=sampled, turns=turns)
        return [(o.value, o.parts, o.turns) if isinstance(o, RewardScore) else (o.reason, str(o)) for o in outcomes]

    async def _started(self) -> None:
        # The first call after each start of the actor's process starts the pool, for all waiting calls.
        if self._starting is not None and self._starting.done() and self._starting.exception() is not None:
            self._pool, self._starting = self._make_pool(), None  # a pool that did not start in time is closed
        if self._starting is None:
            self._starting = asyncio.create_task(self._pool.start())
        await asyncio.shield(self._starting)


class SharedRewards:
    """A worker's client of the service; `async with` waits until the service is ready.

    Args:
        of_set: the evaluation set that has rewards of its own; empty for training.
        wait_s: limit in seconds on the answer to one call, including its time in the queue.
    """

    def __init__(self, of_set: str = "", *, wait_s: float) -> None:
        self._of_set, self._wait_s = of_set, wait_s
        self._counts = {"reward_calls": 0.0, "reward_failures": 0.0}
        self._actor: Any = None

    async def __aenter__(self) -> SharedRewards:
        self._actor = ray.get_actor(service_name(self._of_set))
        try:
            refusal = await asyncio.wait_for(self._actor.ready.remote(), MODEL_START_TIMEOUT_S)
        except TimeoutError:
            refusal = f"the reward service was not ready within {MODEL_START_TIMEOUT_S:.0f} s; see `ray status`"
        if refusal:
            raise ConfigError(refusal)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Does nothing: the service lives as long as the pool of workers."""

    async def score(
        self,
        completions: list[str],
        row: dict[str, Any],
        *,
        sampled: Sequence[Completion] | None = None,
        turns: Sequence[list[str]] | None = None,
    ) -> list[Outcome]:
        """Raises RewardError if the call failed, was not answered in time, or the service is lost."""
        self._counts["reward_calls"] += 1
        try:
            asked = self._actor.score.remote(completions, row, sampled, turns)
            scores: Scores = await asyncio.wait_for(asked, self._wait_s)
        except TimeoutError as error:
            why = f"the reward service gave no answer in {self._wait_s:.0f} s; raise reward.workers"
            raise self._failure(why) from error
        except RayTaskError as error:
            reason = error.cause.reason if isinstance(error.cause, RewardError) else "lost"
            raise self._failure(str(error.cause or error), reason) from error
        except RayActorError as error:
            raise self._failure(f"the reward service is lost: {error}") from error
        except RayError as error:
            raise self._failure(f"Ray could not reach the reward service: {error}") from error
        outcomes = [_outcome(score) for score in scores]
        self._counts["reward_failures"] += any(isinstance(outcome, RewardError) for outcome in outcomes)
        return outcomes

    def stats(self) -> dict[str, float]:
        return dict(self._counts)

    def _failure(self, why: str, reason: str = "lost") -> RewardError:
        self._counts["reward_failures"] += 1
        return RewardError(why, reason)


def _outcome(score: tuple[Any, ...]) -> Outcome:
    first, second, *turns = score
    if isinstance(first, str):
        return RewardError(second, first)
    return RewardScore(value=first, parts=second, turns=tuple(turns[0]))


def service_name(of_set: str = "") -> str:
    """The actor's name, with the Ray job, because a cluster may be shared; the workers run in the job of their pool."""
    return f"reward-{ray.get_runtime_context().get_job_id()}{'-' * bool(of_set)}{of_set}"


def start_service(reward: dict[str, Any], environment: dict[str, str], of_set: str, luggage: Luggage) -> Any:
    """Start the actor in this Ray job; returns its handle before it is ready.

    Args:
        reward: the fields of `RewardConfig`, with absolute local paths.
        environment: variables that must be set before its processes import anything.
        of_set: see `SharedRewards`.
        luggage: files and variables for its node; it does not need the keys.
    """
    # No CPUs are reserved, as for the workers. Scoring twice is harmless, so a lost call is repeated.
    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": reward["gpus"], "max_concurrency": CONCURRENT_CALLS}
    actor_class = ray.remote(max_restarts=RESTARTS, max_task_retries=-1, **options)(RewardService)
    return actor_class.options(name=service_name(of_set)).remote(reward, environment, replace(luggage, keys={}))
