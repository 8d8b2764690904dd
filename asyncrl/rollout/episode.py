"""From an assignment to a finished group, and from a chunk of evaluation rows to its scores.

Token in, token out: the ids the engine sampled are what is trained on; text is decoded only for the reward function.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.data.prompts import PromptSource
from asyncrl.engines.base import Engine, GenerateRequest
from asyncrl.environments.base import Decode, Environment, Episodes, EpisodeTools, Score
from asyncrl.errors import GenerationError, RewardError
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRunner:
    """What every episode of a worker shares."""

    engine: Engine
    environment: Environment
    decode: Decode
    score: Score

    async def run_group(
        self, assignment: Assignment, prompt: Prompt, *, size: int, sampling: SamplingParams, worker: str
    ) -> TrajectoryGroup:
        """Raises GenerationError or RewardError; the caller reports the attempt as failed with that reason."""
        started_at = time.time()
        name = f"{assignment.group_id}.{assignment.attempt}"
        episodes = await self._run(prompt, size, sampling, name=name, seed=assignment.seed)
        return TrajectoryGroup(
            group_id=assignment.group_id,
            prompt_index=assignment.prompt_index,
            attempt=assignment.attempt,
            worker=worker,
            trajectories=episodes.trajectories,
            prompt_text=prompt.text,
            completion_texts=episodes.texts,
            started_at=started_at,
            finished_at=time.time(),
        )

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
        except (GenerationError, RewardError):  # counted: rows without a score are the result's `failed`
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

        tools = EpisodeTools(generate=generate, decode=self.decode, score=self.score)
        return await self.environment.run(prompt, size, tools)
