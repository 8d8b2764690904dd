"""The loop of an evaluation: sends rows through the engine and the reward, and saves each row when it is finished.

    missing rows ──▶ a task each: prompt ▶ engine ▶ reward ──▶ samples.jsonl

consumes:     rows
waits for:    any of the episodes it has begun
unblocked by: their ends; `wait_timeout_s` without a token or environment step. Open rows then count as failed, and if
              the rows after them are silent, too, the engine is considered broken
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from asyncrl.data.prompts import PromptSource
from asyncrl.engines.noise import mix
from asyncrl.environments.base import Episodes
from asyncrl.errors import (
    AsyncRLError,
    DataError,
    EpisodeError,
    GenerationError,
    HopelessRewardError,
    NoProgress,
    RewardError,
)
from asyncrl.evaluation.samples import Sample
from asyncrl.rollout.groups.episode import EpisodeRunner
from asyncrl.rollout.groups.evaluated import samples_of
from asyncrl.rollout.rewards.failure_share import FailureShare
from asyncrl.types import Prompt, SamplingParams

log = logging.getLogger(__name__)

TURN_S = 0.5
SAY_S = 10.0
CANCEL_S = 30.0
"""Longest wait for cancelled episodes."""
FIRST = 400
"""Characters of an error message that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """How every row is evaluated."""

    samples: int
    sampling: SamplingParams
    seed: int
    together: int
    """Rows evaluated at the same time."""
    wait_timeout_s: float
    max_failure_share: float
    """As `reward.max_failure_share`."""


class Evaluator:
    """
    Args:
        progress: returns a number that grows with every token and environment step.
        keep: called with each finished row and its samples, some of which may have failed.
        say: called with a progress line now and then.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        rows: PromptSource,
        plan: EvalPlan,
        *,
        progress: Callable[[], float],
        keep: Callable[[int, Sequence[Sample]], None],
        say: Callable[[str], None],
    ) -> None:
        self._runner, self._rows, self._plan = runner, rows, plan
        self._progress, self._keep, self._say = progress, keep, say
        self._open: dict[asyncio.Task[Episodes], int] = {}
        self._failures = FailureShare(plan.max_failure_share)
        self._kept, self._silences = 0, 0
        self._mark = (-1.0, time.monotonic())

    async def run(self, rows: Iterable[int]) -> None:
        """Evaluate all `rows`. They may finish in any order.

        Raises:
            NoProgress: the engine no longer produces tokens. EngineDiedError: its processes are gone.
            HopelessRewardError: rewards fail too often.
            DiskFullError: from `keep`.
        """
        waiting = deque(rows)
        total, said_at = len(waiting), time.monotonic()
        try:
            while waiting or self._open:
                while waiting and len(self._open) < self._plan.together:
                    row = waiting.popleft()
                    self._open[asyncio.create_task(self._evaluate(row))] = row
                done, _ = await asyncio.wait(self._open, timeout=TURN_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._take(self._open.pop(task), task.result())
                self._look_after(bool(done))
                if time.monotonic() - said_at > SAY_S:
                    said_at = time.monotonic()
                    self._say(f"{self._kept} of {total} rows")
        finally:
            await self._cancel_all()

    async def _evaluate(self, row: int) -> Episodes:
        plan = self._plan
        seed = mix(plan.seed, row) % 2**63
        return await self._runner.run_row(self._rows, row, plan.samples, plan.sampling, name=f"eval.{row}", seed=seed)

    def _take(self, row: int, made: Episodes) -> None:
        self._keep(row, samples_of(row, self._prompt(row), made))
        self._kept += 1
        blamed = [error for error in made.failures if isinstance(error, RewardError | EpisodeError)]
        if too_many := self._failures.add(len(made.members), len(blamed)):
            raise HopelessRewardError(
                f"there was no reward {too_many}. The last one, row {row}: {_short(blamed[-1])}. Fix the reward or the "
                "data, or raise reward.max_failure_share"
            )

    def _prompt(self, row: int) -> Prompt | None:
        try:
            return self._rows[row]
        except DataError:  # its samples carry the error
            return None

    def _look_after(self, something: bool) -> None:
        """Give up open rows, or raise, if there is no progress."""
        mark, now = self._progress() + self._kept, time.monotonic()
        if mark != self._mark[0] or something:
            # A row that was given up is not progress.
            self._silences = 0 if mark != self._mark[0] else self._silences
            self._mark = mark, now
            return
        if now - self._mark[1] <= self._plan.wait_timeout_s:
            return
        silent = (
            f"no token and no environment step for {self._plan.wait_timeout_s:g} s (half of replay.wait_timeout_s). "
            "The engine hangs, or an environment or a reward waits for something else"
        )
        self._silences += 1
        if self._silences > 1:
            raise NoProgress(
                f"{len(self._open)} rows are open, and there was {silent}. The rows given up before ended the same way"
            )
        self._give_up(silent)

    def _give_up(self, silent: str) -> None:
        log.warning("%d rows are given up: there was %s", len(self._open), silent)
        for task, row in list(self._open.items()):
            task.cancel()
            del self._open[task]
            self._keep(row, samples_of(row, self._prompt(row), _all_failed(silent, self._plan.samples)))
        self._mark = self._progress() + self._kept, time.monotonic()

    async def _cancel_all(self) -> None:
        for task in self._open:
            task.cancel()
        _, left = await asyncio.wait(self._open, timeout=CANCEL_S) if self._open else ((), ())
        if left:  # waiting for them would delay the error that ended this loop
            log.warning(
                "%d rows were cancelled but still run after %g s: an environment catches the cancellation",
                len(left),
                CANCEL_S,
            )


def _all_failed(why: str, samples: int) -> Episodes:
    failure: AsyncRLError = GenerationError(f"there was {why}")
    return Episodes(trajectories=(), texts=(), failures=(failure,) * samples)


def _short(error: AsyncRLError) -> str:
    return f"{' '.join(str(error).split()):.{FIRST}}"
