"""The live rollout workers: their names, served versions, assignments, and time of last progress. Volatile: rebuilt
from hellos."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from asyncrl.pace import PACES
from asyncrl.replay.protocol import Member
from asyncrl.types import LOST_TOKENS, NO_VERSION, REWARD_FAILURES

PROGRESS = "progress"
"""Statistic that increases with every token and every environment step; see `asyncrl.rollout.worker.report`."""
FAILED = {reason: f"rewards_failed_{reason}" for reason in REWARD_FAILURES}
"""Statistics of completions without a reward, by reason; see `asyncrl.rollout.rewards.watch`."""
INSERTED = "tokens_inserted"
"""Statistic of the sampled tokens that this server accepted as loss tokens of a group."""
LOST = {fate: f"tokens_lost_{fate}" for fate in LOST_TOKENS}
"""Statistics of sampled tokens that are in no group here, by reason."""
OTHER_CODE = "other_code"
"""Statistic of a worker: whether its copies of the user's files differ from the learner's."""
KEPT = (
    "generated_tokens", "waiting_s", "busy_s", PROGRESS, "overlong_prompts", "rewards_failed", INSERTED, OTHER_CODE,
    *FAILED.values(), *LOST.values(), *PACES,
)  # fmt: skip
"""Statistics that are kept. A worker that makes up names thus cannot fill the memory."""
REMEMBERED = 1024
"""Limit on the workers remembered that are gone and may come back."""


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    name: str
    incarnation: str
    seen: float
    """Time of its last sign of life, by the clock."""
    served: int = NO_VERSION
    fingerprint: str = ""
    capacity: int | None = None
    """Number of groups it can work on at once, according to its last `acquire`; None before the first."""
    held: set[int] = field(default_factory=set)
    """Group ids of the assignments it holds."""
    stats: dict[str, float] = field(default_factory=dict)
    """The statistics in `KEPT`; cumulative since its start."""
    moved: float = 0.0
    """Time of its last progress, or of its arrival."""
    told: float = -math.inf
    """Time of its last heartbeat."""
    pace: float = 0.0
    """Tokens per second that it generated between its last two heartbeats."""


class Workers:
    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.live: dict[str, Worker] = {}
        self.claims: Counter[tuple[int, int | None]] = Counter()
        """(served version, capacity) -> number of live workers with both."""
        self.revision = 0
        """Increases with every change of the live workers, their served versions or their capacities."""
        self.moves = 0
        """Increases with every arrival of a worker and every heartbeat that reports progress."""
        self._past_stats: dict[str, float] = {}
        self._gone: dict[str, dict[str, float]] = {}
        """Incarnation -> its part of `_past_stats`. One that was silent reports its totals since its start again."""

    def hello(self, name: str, incarnation: str, served: int, now: float) -> Worker | None:
        """Register an incarnation. Returns the worker that it replaces, whose assignments must then be released."""
        known = self.live.get(name)
        if known is not None and known.incarnation == incarnation:
            known.seen = now
            self.note(known, served=max(known.served, served))
            return None
        if known is not None:
            self._claim(known, -1)
            self._retire(known)
        self.moves += 1
        stats = self._gone.pop(incarnation, {})
        self._count_past(stats, -1)
        worker = Worker(name=name, incarnation=incarnation, served=served, seen=now, moved=now, stats=stats)
        self.live[name] = worker
        self._claim(worker, 1)
        return known

    def get(self, name: str, incarnation: str) -> Worker | None:
        """Return the live worker; None if it has to say hello (again)."""
        worker = self.live.get(name)
        return worker if worker is not None and worker.incarnation == incarnation else None

    def remove(self, name: str) -> Worker:
        worker = self.live.pop(name)
        self._claim(worker, -1)
        self._gone[worker.incarnation] = worker.stats
        if len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]
        self._retire(worker)
        return worker

    def note(self, worker: Worker, *, served: int | None = None, capacity: int | None = None) -> None:
        """Record the version that a worker serves, or the number of groups that it can work on at once."""
        new = worker.served if served is None else served, worker.capacity if capacity is None else capacity
        if new != (worker.served, worker.capacity):
            self._claim(worker, -1)
            worker.served, worker.capacity = new
            self._claim(worker, 1)

    def _claim(self, worker: Worker, change: int) -> None:
        claim = worker.served, worker.capacity
        self.claims[claim] += change
        if not self.claims[claim]:
            del self.claims[claim]
        self.revision += 1

    def silent(self, now: float) -> list[Worker]:
        """Return the workers without a sign of life for longer than the timeout."""
        return [worker for worker in self.live.values() if now - worker.seen > self.timeout_s]

    def members(self) -> list[Member]:
        return [
            Member(worker=worker.name, incarnation=worker.incarnation, policy_version=worker.served)
            for worker in self.live.values()
        ]

    def total(self, stat: str) -> float:
        """Return the sum of a cumulative statistic over all workers, including those that are gone: never decreases."""
        return self._past_stats.get(stat, 0.0) + sum(worker.stats.get(stat, 0.0) for worker in self.live.values())

    def with_other_code(self) -> int:
        """The number of live workers whose copies of the user's files differ from the learner's."""
        return sum(worker.stats.get(OTHER_CODE, 0.0) > 0 for worker in self.live.values())

    def unfinished_tokens(self) -> float:
        """Tokens sampled by workers that are gone, for groups that they never finished."""
        past = self._past_stats
        ended = sum(past.get(stat, 0.0) for stat in (INSERTED, *LOST.values()))
        return max(0.0, past.get("generated_tokens", 0.0) - ended)

    def report(self, worker: Worker, told: dict[str, float], now: float, *, counted_before: bool) -> None:
        """Store a worker's newest cumulative statistics. `counted_before`: leave out what it did before its first
        report here, which is of an earlier time and would look like a burst."""
        stats = {name: told[name] for name in KEPT if name in told}
        if stats.get(PROGRESS, 0.0) != worker.stats.get(PROGRESS, 0.0):
            worker.moved = now
            self.moves += 1
        if counted_before and not worker.stats:
            self._count_past(stats, -1)
        known = worker.stats.get("generated_tokens")
        if known is not None and now > worker.told:
            worker.pace = max(0.0, stats.get("generated_tokens", 0.0) - known) / (now - worker.told)
        worker.stats, worker.told = stats, now

    def generated(self, now: float) -> float:
        """Estimate the tokens generated by now: as last reported, plus each worker's pace since its report."""
        lately = sum(
            worker.pace * min(now - worker.told, self.timeout_s) for worker in self.live.values() if worker.pace
        )
        return self.total("generated_tokens") + lately

    def _retire(self, worker: Worker) -> None:
        self._count_past(worker.stats, 1)
        worker.stats = {}

    def _count_past(self, stats: dict[str, float], sign: int) -> None:
        for name, value in stats.items():
            self._past_stats[name] = self._past_stats.get(name, 0.0) + sign * value
