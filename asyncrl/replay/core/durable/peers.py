"""What must survive a restart of the server about its peers: who replaced whom, what was posted, what is still owed.

An incarnation is one life of a process. The newest of a name is the one that counts; what an older one still says,
after a pause or from a severed machine, is refused.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from asyncrl.replay.core.durable.events import EvaluationAsked
from asyncrl.replay.protocol import Board

REMEMBERED = 64
"""Incarnations per worker."""
NAMES = 16_384
"""Workers, the last to join. A peer that takes a new name each time fills no memory; what an attempt of a forgotten one
sends is refused by its number."""


class Peers:
    """Written by `ReplayState.apply` alone."""

    def __init__(self) -> None:
        self.learner: str | None = None
        """Incarnation of the running learner."""
        self.run = ""
        """Of that learner, as it says; empty where it says nothing."""
        self.past_learners: list[str] = []
        self.restored: tuple[int, int, int] | None = None
        """(step, policy_version) that the running learner restored, and the version number it was given next."""
        self.workers: dict[str, list[str]] = {}
        """Name -> incarnations, the newest last."""
        self.settled: dict[str, str] = {}
        """Name -> the newest incarnation when a learner restored. Not in the image: a server that is started again lets
        old ranks beside rank 0 ask until the next restore."""
        self.board = Board(revision=0, values={})
        self.evaluations: dict[int, EvaluationAsked] = {}
        """Asked for by the running learner, and not known to have reached it."""
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
        """Incarnation of this worker; empty when none ever said hello."""
        return self.workers.get(worker, [""])[-1]

    def replaced(self, worker: str, incarnation: str) -> bool:
        return incarnation in self.workers.get(worker, ())[:-1]

    def outlived(self, rank: str, incarnation: str) -> bool:
        """Whether there was a newer one of this rank when a learner restored."""
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
        peers.run = next(iter(run), "")  # an image of before has none
        peers.evaluations = {row[0]: EvaluationAsked(*row) for row in jobs}
        peers.restored = None if restored is None else (restored[0], restored[1], restored[2])
        peers.board = Board(revision=board[0], values=board[1])
        return peers
