"""The live rollout workers: who they are, what they serve, what they hold, when they last got on. Volatile: rebuilt by
hellos."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from asyncrl.pace import PACES
from asyncrl.replay.protocol import Member
from asyncrl.types import LOST_TOKENS, NO_VERSION, REWARD_FAILURES

PROGRESS = "progress"
"""Statistic that grows with every token and every environment step; see `asyncrl.rollout.worker.report`."""
FAILED = {reason: f"rewards_failed_{reason}" for reason in REWARD_FAILURES}
"""Statistics of completions without a reward, by reason; see `asyncrl.rollout.rewards.watch`."""
INSERTED = "tokens_inserted"
"""Statistic of the sampled tokens that this server accepted as loss tokens of a group."""
LOST = {fate: f"tokens_lost_{fate}" for fate in LOST_TOKENS}
"""Statistics of sampled tokens that no group here has."""
OTHER_CODE = "other_code"
"""Statistic of a worker: whether files of the user's are others there than where the learner is."""
KEPT = (
    "generated_tokens", "waiting_s", "busy_s", PROGRESS, "overlong_prompts", "rewards_failed", INSERTED, OTHER_CODE,
    *FAILED.values(), *LOST.values(), *PACES,
)  # fmt: skip
"""Statistics that are read here. A worker that invents names fills no memory."""
REMEMBERED = 1024
"""Workers that are gone and may come back."""


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    name: str
    incarnation: str
    seen: float
    """Clock of its last sign of life."""
    served: int = NO_VERSION
    fingerprint: str = ""
    capacity: int | None = None
    """Groups it can work on at once, as far as its last `acquire` told; None before the first."""
    held: set[int] = field(default_factory=set)
    """Group ids of the assignments it holds."""
    stats: dict[str, float] = field(default_factory=dict)
    """Those of `KEPT`; cumulative, since its start."""
    moved: float = 0.0
    """Clock of its last progress, or of its arrival."""
    told: float = -math.inf
    """Clock of its last heartbeat."""
    pace: float = 0.0
    """Tokens per second that it generated between its last two."""


class Workers:
    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.live: dict[str, Worker] = {}
        self.claims: Counter[tuple[int, int | None]] = Counter()
        """Of the live ones, how many serve this version and can take so much."""
        self.revision = 0
        """Grows with every change of who is live, what they serve and how much they can take."""
        self.moves = 0
        """Grows with every arrival of a worker and every heartbeat that tells of progress."""
        self._past_stats: dict[str, float] = {}
        self._gone: dict[str, dict[str, float]] = {}
        """By incarnation: what of it is in `_past_stats`. One that was silent tells its sums since its start again."""

    def hello(self, name: str, incarnation: str, served: int, now: float) -> Worker | None:
        """Welcome an incarnation. Returns the worker it replaces, whose assignments are then to be released."""
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
        """The live worker; None when it has to say hello (again)."""
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
        """What a worker says it serves, or can work on at once."""
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
        """Workers not heard of for longer than the timeout."""
        return [worker for worker in self.live.values() if now - worker.seen > self.timeout_s]

    def members(self) -> list[Member]:
        return [
            Member(worker=worker.name, incarnation=worker.incarnation, policy_version=worker.served)
            for worker in self.live.values()
        ]

    def total(self, stat: str) -> float:
        """Sum of a cumulative statistic over all workers, the gone ones included: never falls."""
        return self._past_stats.get(stat, 0.0) + sum(worker.stats.get(stat, 0.0) for worker in self.live.values())

    def with_other_code(self) -> int:
        """Live ones whose files of the user's are not the learner's."""
        return sum(worker.stats.get(OTHER_CODE, 0.0) > 0 for worker in self.live.values())

    def unfinished_tokens(self) -> float:
        """Sampled by workers that are gone, of groups that they never brought to an end."""
        past = self._past_stats
        ended = sum(past.get(stat, 0.0) for stat in (INSERTED, *LOST.values()))
        return max(0.0, past.get("generated_tokens", 0.0) - ended)

    def report(self, worker: Worker, told: dict[str, float], now: float, *, counted_before: bool) -> None:
        """Newest cumulative statistics. `counted_before`: what it did until its first report here is of an earlier
        time, and would look like a burst."""
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
        """Tokens by now: as told, and since then at the pace before."""
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
