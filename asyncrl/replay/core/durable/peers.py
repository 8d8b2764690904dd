"""The durable state about the server's peers: which incarnations were replaced, the board, and open evaluations.

An incarnation is one life of a process. Only the newest incarnation of a name is valid; requests of older ones, sent
after a pause or from a disconnected machine, are refused.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from asyncrl.replay.core.durable.events import EvaluationAsked
from asyncrl.replay.protocol import Board

REMEMBERED = 64
"""Limit on the incarnations kept per worker."""
NAMES = 16_384
"""Limit on the worker names kept, the last to join. A peer that takes a new name each time thus cannot fill the memory;
an attempt of a forgotten worker is refused by its number."""


class Peers:
    """Written only by `ReplayState.apply`."""

    def __init__(self) -> None:
        self.learner: str | None = None
        """Incarnation of the running learner."""
        self.run = ""
        """That learner's name for its run; empty if it gave none."""
        self.past_learners: list[str] = []
        self.restored: tuple[int, int, int] | None = None
        """Step and policy version that the running learner restored, and the next version number it was given."""
        self.workers: dict[str, list[str]] = {}
        """Name -> incarnations, the newest last."""
        self.settled: dict[str, str] = {}
        """Name -> the newest incarnation when a learner last restored. Not in the image: a restarted server accepts
        requests of old ranks other than rank 0 until the next restore."""
        self.board = Board(revision=0, values={})
        self.evaluations: dict[int, EvaluationAsked] = {}
        """Evaluations requested by the running learner whose results are not known to have reached it, by job id."""
        self.next_job = 0

    def restore(self, incarnation: str, step: int, policy_version: int, next_version: int, run: str) -> None:
        if self.learner is not None and self.learner != incarnation:
            self.past_learners.append(self.learner)
        self.learner, self.run = incarnation, run
        self.settled = {name: lives[-1] for name, lives in self.workers.items()}
        self.evaluations.clear()
        self.restored = (step, policy_version, next_version)

    def join(self, worker: str, incarnation: str) -> None:
        self.workers[worker] = [*self.workers.pop(worker, ()), incarnation][-REMEMBERED:]
        if len(self.workers) > NAMES:
            del self.workers[next(iter(self.workers))]

    def announce(self, values: dict[str, Any]) -> None:
        self.board = Board(revision=self.board.revision + 1, values={**self.board.values, **values})

    def ask(self, evaluation: EvaluationAsked) -> None:
        self.evaluations[evaluation.job_id] = evaluation
        self.next_job = evaluation.job_id + 1

    def close(self, job_id: int) -> None:
        self.evaluations.pop(job_id, None)

    def newest(self, worker: str) -> str:
        """The newest incarnation of this worker; empty if none has said hello."""
        return self.workers.get(worker, [""])[-1]

    def replaced(self, worker: str, incarnation: str) -> bool:
        return incarnation in self.workers.get(worker, ())[:-1]

    def outlived(self, rank: str, incarnation: str) -> bool:
        """Whether there was a newer incarnation of this rank when a learner last restored."""
        lives, newest = self.workers.get(rank, []), self.settled.get(rank)
        return newest in lives and incarnation in lives[: lives.index(newest)]

    def image(self) -> list[Any]:
        restored = None if self.restored is None else list(self.restored)
        board = [self.board.revision, self.board.values]
        jobs = [[getattr(job, item.name) for item in fields(job)] for job in self.evaluations.values()]
        return [self.learner, self.past_learners, restored, self.workers, board, jobs, self.next_job, self.run]

    @classmethod
    def load(cls, image: list[Any]) -> Peers:
        peers = cls()
        [peers.learner, peers.past_learners, restored, peers.workers, board, jobs, peers.next_job, *run] = image
        peers.run = next(iter(run), "")  # older images have none
        peers.evaluations = {row[0]: EvaluationAsked(*row) for row in jobs}
        peers.restored = None if restored is None else (restored[0], restored[1], restored[2])
        peers.board = Board(revision=board[0], values=board[1])
        return peers
