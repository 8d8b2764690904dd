"""Evaluation jobs: rows of a set are handed out in chunks and scored during the training, across weight updates.

    start ──▶ next_for (a chunk per worker) ──▶ report | release ──▶ take

Jobs do not delay weight updates: a chunk runs on whatever its engine serves, and the summary gives the range of
versions. Several sets take turns, chunk by chunk: otherwise a long set would cause every job of a short one to be
superseded. A job that no worker has begun when the next one of its set arrives is superseded: it would be measured on
the weights of that one. Volatile: a restore cancels all jobs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from asyncrl.errors import ReplayError
from asyncrl.evaluation.orders import EvalAssignment, EvalJob, EvalResult, EvalSummary
from asyncrl.evaluation.samples import MOST_SAMPLES
from asyncrl.evaluation.table import OF_SOURCE, means
from asyncrl.types import NO_VERSION

_MEAN = ""
"""Key of the scores themselves among the figures."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    asked: EvalJob
    waiting: deque[EvalAssignment]
    """Chunks that no worker holds."""
    open: int
    """Number of chunks without a result."""
    begun: bool = False
    results: dict[int, EvalResult] = field(default_factory=dict)
    """Results by chunk number."""

    def summary(self, superseded: int) -> EvalSummary:
        """Summarize all chunks, with their rows in the order of the file, whichever chunk finished first."""
        results = [self.results[number] for number in sorted(self.results)]
        columns: dict[str, list[float | None]] = {_MEAN: [score for result in results for score in result.scores]}
        for name in dict.fromkeys(name for result in results for name in result.figures):
            nothing = [(None,) * len(result.scores) for result in results]
            found = [result.figures.get(name, none) for result, none in zip(results, nothing, strict=True)]
            columns[name] = [value for values in found for value in values]
        taken = {name: np.array(values, np.float64) for name, values in columns.items()}
        # Sources may have rewards of different ranges. Of the samples themselves the best is known, by `best@k`.
        sources = {name: column for name, column in taken.items() if name.endswith(OF_SOURCE)}
        whole_set = {name: column for name, column in taken.items() if name not in sources}
        known = means(whole_set, np.concatenate(list(whole_set.values()))) | means(sources)
        whole = known.pop(_MEAN, None)
        asked, scored = self.asked, [result for result in results if result.version_min != NO_VERSION]
        return EvalSummary(
            job_id=asked.job_id,
            step=asked.step,
            policy_version=asked.policy_version,
            eval_set=asked.eval_set,
            mean=whole.value if whole else 0.0,
            low=whole.low if whole else None,
            high=whole.high if whole else None,
            count=len(columns[_MEAN]),
            failed=sum(result.failed for result in results),
            version_min=min((result.version_min for result in scored), default=asked.policy_version),
            version_max=max((result.version_max for result in scored), default=asked.policy_version),
            superseded=superseded,
            samples=tuple(sample for result in results for sample in result.samples)[:MOST_SAMPLES],
            figures={f"{name}{end}": value for name, each in known.items() for end, value in each.with_ends()},
        )


class Evaluations:
    def __init__(self, max_attempts: int) -> None:
        self.max_attempts = max_attempts
        self.moves = 0
        """Increases with every result."""
        self._jobs: dict[int, _Job] = {}
        self._held: dict[str, tuple[_Job, EvalAssignment]] = {}
        """Worker -> the chunk it scores: one at a time, or the first worker to ask would take all of them."""
        self._finished: list[EvalSummary] = []
        self._superseded: dict[str, int] = {}
        """Set -> number of jobs superseded since its last summary."""
        self._turns: dict[str, int] = {}
        """Set -> turn number of its last chunk handed out; turns are counted over all sets."""

    @property
    def open(self) -> bool:
        return bool(self._jobs)

    @property
    def wanted(self) -> bool:
        """Whether a chunk waits for a worker."""
        return any(job.waiting for job in self._jobs.values())

    def start(self, asked: EvalJob) -> list[int]:
        """Start a job. Returns the ids of the jobs that it supersedes.

        Raises:
            ReplayError: there is nothing to score.
        """
        job_id, eval_set, rows, chunk = asked.job_id, asked.eval_set, asked.rows, asked.chunk
        if rows < 1 or chunk < 1:
            raise ReplayError(f"an evaluation needs at least one row per chunk; got rows={rows}, chunk={chunk}")
        superseded = [known for known, job in self._jobs.items() if job.asked.eval_set == eval_set and not job.begun]
        for number in superseded:
            del self._jobs[number]
        self._superseded[eval_set] = self._superseded.get(eval_set, 0) + len(superseded)
        waiting = deque(
            EvalAssignment(
                job_id=job_id, chunk=number, attempt=0, eval_set=eval_set, start=start, stop=min(start + chunk, rows)
            )
            for number, start in enumerate(range(0, rows, chunk))
        )
        self._jobs[job_id] = _Job(asked=asked, waiting=waiting, open=len(waiting))
        return superseded

    def next_for(self, worker: str, served: int) -> EvalAssignment | None:
        """Return the next chunk for a worker that serves `served`; None if there is none or it still holds one."""
        if worker in self._held:
            return None
        ready = [job for job in self._jobs.values() if job.waiting and served >= job.asked.policy_version]
        if not ready:
            return None
        job = min(ready, key=lambda one: self._turns.get(one.asked.eval_set, 0))  # the oldest job of a set
        chunk, job.begun = job.waiting.popleft(), True
        self._turns[job.asked.eval_set] = max(self._turns.values(), default=0) + 1
        self._held[worker] = job, chunk
        return chunk

    def report(self, worker: str, result: EvalResult) -> None:
        """Store the result of a chunk. Late or repeated reports have no effect.

        Raises:
            ReplayError: its rows are not those of the chunk, a figure does not have one value per score, or a sample is
                of a row of another chunk.
        """
        if worker not in self._held:
            return
        job, chunk = self._held[worker]
        if (result.job_id, result.chunk, result.attempt) != (chunk.job_id, chunk.chunk, chunk.attempt):
            return
        if len(result.scores) + result.failed + result.missing != chunk.stop - chunk.start:
            raise ReplayError(
                f"evaluation chunk {chunk.start}:{chunk.stop} came back with {len(result.scores)} scores, "
                f"{result.failed} failures and {result.missing} rows that do not exist; together they must cover its "
                "rows"
            )
        uneven = [name for name, values in result.figures.items() if len(values) != len(result.scores)]
        if uneven:
            raise ReplayError(
                f"evaluation chunk {chunk.start}:{chunk.stop} came back with {len(result.scores)} scores, but "
                f"{len(result.figures[uneven[0]])} values of {uneven[0]}. It must have one value per score, or none"
            )
        strange = [sample.row for sample in result.samples if not chunk.start <= sample.row < chunk.stop]
        if strange:
            raise ReplayError(
                f"evaluation chunk {chunk.start}:{chunk.stop} came back with a sample of row {strange[0]}"
            )
        del self._held[worker]
        self._close(job, result)

    def release(self, worker: str) -> None:
        """Release the chunk of a lost worker: it goes to another worker, or counts as failed after the last attempt."""
        if worker not in self._held:
            return
        job, chunk = self._held.pop(worker)
        chunk = replace(chunk, attempt=chunk.attempt + 1)
        if chunk.attempt < self.max_attempts:
            job.waiting.appendleft(chunk)
        else:
            self._close(job, EvalResult.all_failed(chunk))

    def cancel(self) -> None:
        for keeper in (self._jobs, self._held, self._finished, self._superseded, self._turns):
            keeper.clear()

    def take(self) -> tuple[EvalSummary, ...]:
        """Return the summaries of finished jobs that were not handed out before."""
        summaries, self._finished = tuple(self._finished), []
        return summaries

    def waiting_rows(self) -> int:
        """The number of rows without a result."""
        unasked = [chunk for job in self._jobs.values() for chunk in job.waiting]
        return sum(chunk.stop - chunk.start for chunk in (*unasked, *(chunk for _, chunk in self._held.values())))

    def _close(self, job: _Job, result: EvalResult) -> None:
        """Store the result of a chunk; after the last one, make the job's summary."""
        self.moves += 1
        job.results[result.chunk] = result
        job.open -= 1
        if job.open:
            return
        del self._jobs[job.asked.job_id]
        self._finished.append(job.summary(self._superseded.pop(job.asked.eval_set, 0)))
