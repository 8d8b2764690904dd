"""From an assignment to a finished group, and from a chunk of evaluation rows to its scores.

Token in, token out: the ids the engine sampled are what is trained on; text is decoded only for the reward function.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.data.prompts import PromptSource
from asyncrl.engines.base import Engine, GenerateRequest
from asyncrl.environments.base import Decode, Encode, Environment, Episodes, EpisodeTools, Score
from asyncrl.environments.faults import FAILURES
from asyncrl.errors import AsyncRLError, IncompleteGroupError
from asyncrl.rollout.reward_parts import RewardParts
from asyncrl.types import (
    NO_VERSION,
    Assignment,
    Completion,
    EvalAssignment,
    EvalResult,
    Prompt,
    SamplingParams,
    TrajectoryGroup,
)

NEXT_TRY = 0x9E3779B97F4A7C15
"""Added to the seed for each further try at missing members, or they would be sampled as before and fail as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """How many members a group has, how many are enough, and how often they are tried for."""

    size: int
    fewest: int
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRunner:
    """What every episode of a worker shares."""

    engine: Engine
    environment: Environment
    decode: Decode
    encode: Encode
    score: Score
    parts: RewardParts = field(default_factory=RewardParts)

    async def run_group(
        self, assignment: Assignment, prompt: Prompt, *, shape: GroupShape, sampling: SamplingParams, worker: str
    ) -> TrajectoryGroup:
        """The caller reports the attempt as failed with the reason that is raised.

        Raises:
            GenerationError, RewardError, EpisodeError: no member came to its end, no greedy completion did, however
                often it was tried, or something that the learner needs is missing.
            IncompleteGroupError: some members did, but fewer than are enough, however often the others were tried.
        """
        started_at = time.time()
        name = f"{assignment.group_id}.{assignment.attempt}"
        # Side by side: one after the other would double the time that a group takes.
        both = (
            asyncio.create_task(self._run_members(prompt, shape, sampling, name=name, seed=assignment.seed)),
            asyncio.create_task(self._run_greedy(prompt, shape, name)),
        )
        try:
            episodes, greedy = await asyncio.gather(*both)
        except BaseException:
            # One failed or both are cancelled: the other would generate on for nobody, beyond the worker's slots.
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            raise
        return TrajectoryGroup(
            group_id=assignment.group_id,
            prompt_index=assignment.prompt_index,
            attempt=assignment.attempt,
            worker=worker,
            trajectories=self.parts.complete(episodes.trajectories, greedy),
            prompt_text=prompt.text,
            completion_texts=episodes.texts,
            started_at=started_at,
            finished_at=time.time(),
        )

    async def _run_greedy(self, prompt: Prompt, shape: GroupShape, name: str) -> Episodes | None:
        """The completion whose reward is the baseline; None where there is no such baseline.

        It is tried as often as missing members are: one reward that fails would cost the group all of them.
        """
        if self.parts.greedy is None:
            return None
        failures: list[AsyncRLError] = []
        for again in range(shape.tries):
            try:
                made = await self._run(prompt, 1, self.parts.greedy, name=f"{name}.greedy{again}", seed=0)
            except FAILURES as error:  # counted as one of the tries
                failures.append(error)
                continue
            if made.trajectories:
                return made
            failures += made.failures
        raise failures[-1]

    async def _run_members(
        self, prompt: Prompt, shape: GroupShape, sampling: SamplingParams, *, name: str, seed: int
    ) -> Episodes:
        """Those that fail are made again alone, once any sibling has come to its end."""
        made = await self._run(prompt, shape.size, sampling, name=name, seed=seed)
        failures: list[AsyncRLError] = list(made.failures)
        for again in range(1, shape.tries):
            missing = shape.size - len(made.trajectories)
            if not missing:
                break
            fresh = (seed + again * NEXT_TRY) % 2**63
            try:
                more = await self._run(prompt, missing, sampling, name=f"{name}.again{again}", seed=fresh)
            except FAILURES as error:  # counted as one of the tries
                failures.append(error)
                continue
            failures += more.failures
            made = Episodes(trajectories=made.trajectories + more.trajectories, texts=made.texts + more.texts)
        if len(made.trajectories) < shape.fewest:
            raise IncompleteGroupError(
                f"{len(made.trajectories)} of {shape.size} members after {shape.tries} tries, {shape.fewest} are "
                f"needed; the last failure: {failures[-1]}"
            )
        return made

    async def run_evaluation(
        self, assignment: EvalAssignment, rows: PromptSource, *, sampling: SamplingParams
    ) -> EvalResult:
        """Score rows `[start, stop)`, one episode each, all at one version (the caller holds it in the engine).

        Rows whose generation or reward failed, or that still came from another version, have no score.
        """
        episodes = (
            self._evaluate(rows[row], sampling, f"eval.{assignment.job_id}.{row}.{assignment.attempt}")
            for row in range(assignment.start, assignment.stop)
        )
        outcomes = [outcome for outcome in await asyncio.gather(*episodes) if outcome is not None]
        versions = [version for version, _ in outcomes]
        version = max(set(versions), key=lambda v: (versions.count(v), v), default=assignment.policy_version)
        scores = tuple(score for scored_at, score in outcomes if scored_at == version)
        return EvalResult(
            job_id=assignment.job_id,
            chunk=assignment.chunk,
            attempt=assignment.attempt,
            policy_version=version,
            scores=scores,
            failed=assignment.stop - assignment.start - len(scores),
        )

    async def _evaluate(self, prompt: Prompt, sampling: SamplingParams, name: str) -> tuple[int, float] | None:
        """`(version, score)` of one row; None when generation or reward failed. A version change inside it fails it."""
        try:
            episodes = await self._run(prompt, 1, sampling, name=name, seed=0, pinned=True)
        except FAILURES:  # counted: rows without a score are the result's `failed`
            return None
        if not episodes.trajectories:
            return None
        (trajectory,) = episodes.trajectories
        versions = set(trajectory.policy_versions[trajectory.loss_mask].tolist())
        if len(versions) > 1:
            return None
        return (versions.pop() if versions else NO_VERSION), trajectory.reward

    async def _run(
        self, prompt: Prompt, size: int, sampling: SamplingParams, *, name: str, seed: int, pinned: bool = False
    ) -> Episodes:
        turns = itertools.count()

        async def generate(token_ids: NDArray[np.int32], n: int) -> list[Completion]:
            turn = next(turns)
            request = GenerateRequest(
                request_id=f"{name}.{turn}",
                prompt_ids=token_ids,
                n=n,
                sampling=sampling,
                seed=(seed + turn) % 2**63,
                pinned=pinned,
            )
            return await self.engine.generate(request)

        tools = EpisodeTools(generate=generate, decode=self.decode, encode=self.encode, score=self.score)
        return await self.environment.run(prompt, size, tools)
