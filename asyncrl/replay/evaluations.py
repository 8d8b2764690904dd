"""Evaluation jobs: rows of a set handed out in chunks, each scored at one version. Volatile: a restore cancels them."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.errors import ReplayError
from asyncrl.types import EvalAssignment, EvalResult, EvalSummary


@dataclass(slots=True, kw_only=True, eq=False)
class _Chunk:
    number: int
    start: int
    stop: int
    attempt: int = 0
    worker: str = ""
    """Who holds it; empty while it waits."""
    result: EvalResult | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    job_id: int
    step: int
    policy_version: int
    eval_set: str
    chunks: list[_Chunk] = field(default_factory=list)


class Evaluations:
    def __init__(self, max_attempts: int) -> None:
        self.max_attempts = max_attempts
        self._jobs: dict[int, _Job] = {}
        self._finished: list[EvalSummary] = []

    @property
    def open(self) -> bool:
        return bool(self._jobs)

    def start(self, *, job_id: int, step: int, policy_version: int, eval_set: str, rows: int, chunk: int) -> None:
        """Raises ReplayError when there is nothing to score."""
        if rows < 1 or chunk < 1:
            raise ReplayError(f"an evaluation needs at least one row per chunk; got rows={rows}, chunk={chunk}")
        job = _Job(job_id=job_id, step=step, policy_version=policy_version, eval_set=eval_set)
        starts = range(0, rows, chunk)
        job.chunks = [_Chunk(number=n, start=a, stop=min(a + chunk, rows)) for n, a in enumerate(starts)]
        self._jobs[job.job_id] = job

    def next_for(self, worker: str, served: int) -> EvalAssignment | None:
        """The next chunk for a worker that serves `served`; None when there is none for it, or it still holds one."""
        if any(chunk.worker == worker and chunk.result is None for job in self._jobs.values() for chunk in job.chunks):
            return None
        for job in self._jobs.values():
            if served < job.policy_version:
                continue
            for chunk in job.chunks:
                if not chunk.worker and chunk.result is None:
                    chunk.worker = worker
                    return self._assignment(job, chunk, served)
        return None

    def report(self, worker: str, result: EvalResult) -> None:
        """Late or repeated reports change nothing.

        Raises:
            ReplayError: the scores are more than the rows of the chunk.
        """
        job = self._jobs.get(result.job_id)
        if job is None or not 0 <= result.chunk < len(job.chunks):
            return
        chunk = job.chunks[result.chunk]
        if chunk.result is not None or chunk.worker != worker or chunk.attempt != result.attempt:
            return
        if len(result.scores) + result.failed != chunk.stop - chunk.start:
            raise ReplayError(
                f"evaluation chunk {chunk.start}:{chunk.stop} came back with {len(result.scores)} scores and "
                f"{result.failed} failures; together they must be its rows"
            )
        chunk.result = result
        self._close_if_done(job)

    def release(self, worker: str) -> None:
        """The worker is gone: its chunk goes to another, or counts as failed after the last attempt."""
        for job in list(self._jobs.values()):
            for chunk in job.chunks:
                if chunk.worker == worker and chunk.result is None:
                    self._retry(job, chunk)
            self._close_if_done(job)

    def cancel(self) -> None:
        self._jobs.clear()
        self._finished.clear()

    def take(self) -> tuple[EvalSummary, ...]:
        """Finished jobs not handed out before."""
        summaries, self._finished = tuple(self._finished), []
        return summaries

    def waiting_rows(self) -> int:
        return sum(c.stop - c.start for job in self._jobs.values() for c in job.chunks if c.result is None)

    def _assignment(self, job: _Job, chunk: _Chunk, served: int) -> EvalAssignment:
        return EvalAssignment(
            job_id=job.job_id,
            chunk=chunk.number,
            attempt=chunk.attempt,
            eval_set=job.eval_set,
            start=chunk.start,
            stop=chunk.stop,
            policy_version=served,
        )

    def _retry(self, job: _Job, chunk: _Chunk) -> None:
        chunk.worker = ""
        chunk.attempt += 1
        if chunk.attempt >= self.max_attempts:
            chunk.result = EvalResult(
                job_id=job.job_id,
                chunk=chunk.number,
                attempt=chunk.attempt,
                policy_version=job.policy_version,
                scores=(),
                failed=chunk.stop - chunk.start,
            )

    def _close_if_done(self, job: _Job) -> None:
        if any(chunk.result is None for chunk in job.chunks):
            return
        results = [chunk.result for chunk in job.chunks if chunk.result is not None]
        scores = [score for result in results for score in result.scores]
        versions = [result.policy_version for result in results]
        self._finished.append(
            EvalSummary(
                job_id=job.job_id,
                step=job.step,
                eval_set=job.eval_set,
                accuracy=sum(scores) / len(scores) if scores else 0.0,
                count=len(scores),
                failed=sum(result.failed for result in results),
                version_min=min(versions),
                version_max=max(versions),
            )
        )
        del self._jobs[job.job_id]
