"""From an assignment to a finished group, and from a chunk of evaluation rows to its scores.

Token in, token out: the ids the engine sampled are what is trained on; text is decoded only for the reward function.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.base import Chat
from asyncrl.data.prompts import PromptSource
from asyncrl.engines.base import GenerateRequest, Sampler
from asyncrl.environments.base import Decode, Encode, Environment, Episodes, EpisodeTools, Score
from asyncrl.environments.faults import FAILURES
from asyncrl.errors import (
    AsyncRLError,
    ContextFullError,
    DataError,
    EpisodeError,
    IncompleteGroupError,
    OverlongError,
    RewardError,
)
from asyncrl.evaluation.orders import EvalAssignment, EvalResult
from asyncrl.loops import together
from asyncrl.rewards.score import Outcome
from asyncrl.rollout.groups.evaluated import EvaluatedSet
from asyncrl.rollout.rewards.parts import RewardParts
from asyncrl.rollout.rewards.watch import RewardWatch
from asyncrl.spans import span
from asyncrl.types import NO_VERSION, Assignment, Completion, Prompt, SamplingParams, Trajectory, TrajectoryGroup

log = logging.getLogger(__name__)

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

    engine: Sampler
    environment: Environment
    decode: Decode
    encode: Encode
    score: Score
    parts: RewardParts = field(default_factory=RewardParts)
    stepped: Callable[[], None] = lambda: None
    """Called at each environment step: an answer of the engine, or of the reward, that an episode asked for."""
    watch: RewardWatch = field(default_factory=RewardWatch)
    chat: Chat | None = None
    timeout_s: float = 0.0
    """Limit on the seconds of one episode, as `environment.timeout_s`."""
    max_tokens: int = 0
    """Limit on the tokens of one episode, as `environment.max_tokens`."""
    sampled: Counter[str] = field(default_factory=Counter)
    """Tokens by the order that they were sampled for: what `order_name` and `evaluation_name` give. Whoever gave it
    takes them out at its end."""
    max_prompt_tokens: int | None = None
    """Limit on the first request of an episode, as `data.max_prompt_tokens`; None for none."""
    overlong: str = "drop"
    """What a longer one raises: a DataError for `error`, else an OverlongError."""
    accuracy: bool = False
    """Whether the reward says it is one (`reward.metric`): then an evaluated row scores 0 or 1, or has failed."""

    async def run_group(
        self, assignment: Assignment, prompt: Prompt, *, shape: GroupShape, sampling: SamplingParams, worker: str
    ) -> TrajectoryGroup:
        """The caller reports the attempt as failed with the reason that is raised.

        Raises:
            OverlongError, DataError: the first request is too long.
            GenerationError, RewardError, EpisodeError: no member came to its end, no greedy completion did, however
                often it was tried, or something that the learner needs is missing.
            HopelessRewardError: rewards fail too often, of this group and of those before it.
            IncompleteGroupError: some members did, but fewer than are enough, however often the others were tried.
        """
        started_at = time.time()
        name = order_name(assignment)
        # Side by side: one after the other would double the time that a group takes.
        episodes, greedy = await together(
            asyncio.create_task(self._run_members(prompt, shape, sampling, name=name, seed=assignment.seed)),
            asyncio.create_task(self._run_greedy(prompt, shape, name)),
        )
        return TrajectoryGroup(
            group_id=assignment.group_id,
            prompt_index=assignment.prompt_index,
            attempt=assignment.attempt,
            worker=worker,
            trajectories=self.parts.complete(episodes.trajectories, greedy),
            prompt_text=episodes.prompt_text or prompt.text,
            completion_texts=episodes.texts,
            started_at=started_at,
            finished_at=time.time(),
            lost=next(iter(episodes.failures), None),
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
                made = await self._run_watched(prompt, 1, self.parts.greedy, name=f"{name}.greedy{again}", seed=0)
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
        """Those that fail are made again alone, once any sibling has come to its end. Of `failures` the last one is
        returned, where members are missing."""
        run = partial(self._run_watched, check=self.parts.check)
        made = await run(prompt, shape.size, sampling, name=name, seed=seed)
        failures: list[AsyncRLError] = list(made.failures)
        for again in range(1, shape.tries):
            missing = shape.size - len(made.members)
            if not missing:
                break
            fresh = (seed + again * NEXT_TRY) % 2**63
            try:
                more = await run(prompt, missing, sampling, name=f"{name}.again{again}", seed=fresh)
            except FAILURES as error:  # counted as one of the tries
                failures.append(error)
                continue
            failures += more.failures
            made = Episodes(
                trajectories=made.trajectories + more.trajectories,
                texts=made.texts + more.texts,
                prompt_text=made.prompt_text,
            )
        if len(made.members) < shape.fewest:
            raise IncompleteGroupError(
                f"{len(made.members)} of {shape.size} members after {shape.tries} tries, {shape.fewest} are "
                f"needed; the last failure: {failures[-1]}"
            )
        return replace(made, failures=tuple(failures[-1:]) if len(made.members) < shape.size else ())

    async def run_evaluation(self, assignment: EvalAssignment, given: EvaluatedSet) -> EvalResult:
        """Score rows `[start, stop)` on whatever weights the engine has meanwhile.

        Rows of which no sample has a score, whyever, have none; the first reason is logged. Rows past the end of the
        file are none.
        """
        stop = min(assignment.stop, given.rows.rows)
        name = f"{evaluation_name(assignment)}.{assignment.attempt}"
        episodes = (
            # Seeded by the row alone: two points of a curve differ by the weights, and by no luck of the draw.
            self.run_row(given.rows, row, given.samples, given.sampling, name=f"{name}.{row}", seed=row)
            for row in range(assignment.start, stop)
        )
        outcomes = await asyncio.gather(*episodes)
        scored = [outcome for outcome in outcomes if outcome.trajectories]
        failures = [failure for outcome in outcomes for failure in outcome.failures]
        if failures:
            what = f"{len(failures)} of {len(outcomes) * given.samples} samples of evaluation {assignment.eval_set}"
            log.warning("%s have no score; the first: %s", what, failures[0])
        made = [trajectory for outcome in scored for trajectory in outcome.trajectories]
        versions = np.concatenate([np.empty(0, np.int32), *(one.policy_versions[one.loss_mask] for one in made)])
        return EvalResult(
            job_id=assignment.job_id,
            chunk=assignment.chunk,
            attempt=assignment.attempt,
            version_min=int(versions.min()) if len(versions) else NO_VERSION,
            version_max=int(versions.max()) if len(versions) else NO_VERSION,
            scores=tuple(float(np.mean([one.reward for one in outcome.members])) for outcome in scored),
            failed=len(outcomes) - len(scored),
            missing=assignment.stop - assignment.start - len(outcomes),
            figures=given.figures(outcomes, assignment.start),
            samples=given.samples_kept(outcomes, assignment.start),
        )

    async def run_row(
        self, rows: PromptSource, row: int, samples: int, sampling: SamplingParams, *, name: str, seed: int
    ) -> Episodes:
        """`samples` episodes of an evaluation row, those among the failures that have no score that counts.

        Raises:
            EngineDiedError: there is nothing to evaluate with.
        """
        try:
            made = await self._run(rows[row], samples, sampling, name=name, seed=seed)
        except (*FAILURES, DataError) as error:  # counted; and a row that cannot be used is no reason to end a worker
            return Episodes(trajectories=(), texts=(), failures=(error,) * samples)
        failures = list(made.failures)
        failures += [
            RewardError(f"{rows.where(row)}: reward.metric=accuracy, but the score is {trajectory.reward}")
            for trajectory in made.members
            if not self._counts(trajectory)
        ]
        kept = [place for place, trajectory in enumerate(made.trajectories) if self._counts(trajectory)]
        scored = Episodes(
            trajectories=tuple(made.trajectories[place] for place in kept),
            texts=tuple(made.texts[place] for place in kept),
            prompt_text=made.prompt_text,
        )
        lost = samples - len(scored.members) - len(failures)
        return replace(scored, failures=(*failures, *[EpisodeError("the environment made no trajectory")] * lost))

    def _counts(self, trajectory: Trajectory) -> bool:
        return not self.accuracy or trajectory.reward in (0.0, 1.0)

    async def _run_watched(
        self,
        prompt: Prompt,
        size: int,
        sampling: SamplingParams,
        *,
        name: str,
        seed: int,
        check: Callable[[Sequence[Trajectory]], None] = lambda trajectories: None,
    ) -> Episodes:
        try:
            made = await self._run(prompt, size, sampling, name=name, seed=seed)
            check(made.trajectories)
        except (RewardError, EpisodeError) as error:
            self.watch.saw(prompt.row, 0, [error] * size)
            raise
        self.watch.saw(prompt.row, len(made.members), made.failures)
        return made

    async def _run(self, prompt: Prompt, size: int, sampling: SamplingParams, *, name: str, seed: int) -> Episodes:
        turns, order = itertools.count(), traced(name)
        first: list[NDArray[np.int32]] = []
        too_long: list[DataError] = []
        longest = min(self.engine.max_length, self.max_tokens or self.engine.max_length)

        async def generate(
            token_ids: NDArray[np.int32],
            n: int = 1,
            *,
            max_tokens: int | None = None,
            stop: Sequence[str | int] = (),
            temperature: float | None = None,
        ) -> list[Completion]:
            turn = next(turns)
            if not first:
                first.append(token_ids)
                too_long.extend(self._too_long(prompt, token_ids))
            if too_long:
                raise ContextFullError(str(too_long[0]))
            limit = min(sampling.max_new_tokens, sampling.max_new_tokens if max_tokens is None else max_tokens)
            # A prompt that is too long by itself is for the engine to refuse: cut to one token nobody would see why.
            if len(token_ids) > len(prompt.token_ids) or self.max_tokens:
                limit = min(limit, room_in(longest, len(token_ids)))
            request = GenerateRequest(
                request_id=f"{name}.{turn}",
                prompt_ids=token_ids,
                n=n,
                sampling=changed_sampling(sampling, limit, stop, temperature),
                seed=(seed + turn) % 2**63,
                text_of=self._text_of,
            )
            with span("generate", **order, turn=turn, siblings=n) as generated:
                completions = await self.engine.generate(request)
                generated.also(tokens=sum(len(each.token_ids) for each in completions))
            self.sampled[".".join(name.split(".", 2)[:2])] += sum(len(each.token_ids) for each in completions)
            self.stepped()
            if temperature is None or temperature == sampling.temperature:
                return completions
            return [replace(completion, trainable=False) for completion in completions]

        async def score(
            completions: list[str],
            row: dict[str, Any],
            *,
            sampled: Sequence[Completion] | None = None,
            turns: Sequence[list[str]] | None = None,
        ) -> list[Outcome]:
            more = {} if turns is None else {"turns": turns}
            with span("reward", **order):
                outcomes = await self.score(completions, row, sampled=sampled, **more)
            self.stepped()
            return outcomes

        tools = EpisodeTools(
            generate=generate,
            decode=self.decode,
            encode=self.encode,
            score=score,
            chat=self.chat,
            timeout_s=self.timeout_s,
        )
        try:
            with span("environment", **order):
                made = await self.environment.run(prompt, size, tools)
        except FAILURES:
            if too_long:  # whatever the environment made of the refusal
                raise too_long[0] from None
            raise
        if too_long:
            raise too_long[0]
        own = bool(first) and not np.array_equal(first[0], prompt.token_ids)
        return replace(made, prompt_text=self._text_of(first[0].tolist()) if own else prompt.text)

    def _too_long(self, prompt: Prompt, first: NDArray[np.int32]) -> list[DataError]:
        """The error for a first request that is too long; nothing for one that fits."""
        if self.max_prompt_tokens is None or len(first) <= self.max_prompt_tokens:
            return []
        kind = DataError if self.overlong == "error" else OverlongError
        said = (
            f"{prompt.where}: the environment's first request has {len(first)} tokens, the limit is "
            f"{self.max_prompt_tokens}. Raise data.max_prompt_tokens, or remove the row"
        )
        return [kind(said)]

    def _text_of(self, ids: Sequence[int]) -> str:
        return self.decode([np.asarray(ids, np.int32)], special=True)[0]


def order_name(assignment: Assignment) -> str:
    """Return the name of an attempt at a group, as it is in the names of its requests."""
    return f"{assignment.group_id}.{assignment.attempt}"


def evaluation_name(assignment: EvalAssignment) -> str:
    """Return the name of an evaluation, as it is in the names of its requests."""
    return f"eval.{assignment.job_id}"


def traced(name: str) -> dict[str, Any]:
    """Return what the spans of a request belong to: a group and attempt, or an evaluation."""
    first, second, *_ = [*name.split("."), "0"]
    if not (first.isdecimal() and second.isdecimal()):
        return {"lane": "evaluations", "evaluation": second}
    return {"lane": "groups", "group": int(first), "attempt": int(second)}


def room_in(longest: int, length: int) -> int:
    """Return the number of tokens that fit after `length`. Raises ContextFullError if none does."""
    if longest <= length:
        raise ContextFullError(
            f"the episode has {length} tokens, but the engine and environment.max_tokens allow at most {longest}"
        )
    return longest - length


def changed_sampling(
    sampling: SamplingParams, limit: int, stop: Sequence[str | int], temperature: float | None
) -> SamplingParams:
    """Return the sampling of one call. Raises ValueError for an invalid limit, temperature or stop text."""
    if limit < 1:
        raise ValueError(f"max_tokens must be 1 or more; got {limit}")
    if temperature is not None and temperature < 0:
        raise ValueError(f"temperature must be >= 0 (0 is greedy); got {temperature}")
    stops = (stop,) if isinstance(stop, str) else stop  # a text is a sequence of texts too: its letters
    texts = tuple(each for each in stops if isinstance(each, str))
    ids = tuple(int(each) for each in stops if not isinstance(each, str))
    if not all(texts):
        raise ValueError("a stop text must not be empty: it would end every reply at once")
    return replace(
        sampling,
        temperature=sampling.temperature if temperature is None else temperature,
        max_new_tokens=limit,
        stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *ids))),
        stop=(*sampling.stop, *texts),
    )
