"""What a worker tells of itself with every heartbeat: cumulative counters, read from the client's IO thread."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from asyncrl.spans import lap

StatsSource = Callable[[], dict[str, float]]


class WorkerReport:
    """Counters plus two clocks: `busy_s` while anything is being made, `waiting_s` while nothing is (no admission).

    Call it for the statistics. One thread writes, any may read.
    """

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self.sampled: Counter[str] = Counter()
        """Tokens by the order that they were sampled for, until it ends; see `EpisodeRunner`."""
        self._sources: list[StatsSource] = []
        self._seconds = {True: 0.0, False: 0.0}
        self._working = False
        self._since = time.monotonic()
        self._lock = threading.Lock()
        """Without it a heartbeat between two statements of `working` would count the same seconds twice."""

    def add(self, source: StatsSource) -> None:
        """Include the counters of the engine, the reward pool, the subscriber."""
        self._sources.append(source)

    def count(self, name: str, amount: float = 1.0) -> None:
        self._counts[name] = self._counts.get(name, 0.0) + amount

    def working(self, working: bool) -> None:
        if working == self._working:
            return
        self.lap()
        now = time.monotonic()
        with self._lock:
            self._seconds[self._working] += now - self._since
            self._working, self._since = working, now

    def lap(self) -> None:
        """Of the trace: called now and then, so that one who is killed has told what it did."""
        lap("make groups" if self._working else "wait for admission")

    def start_clocks(self) -> None:
        """From now on time counts as waiting: loading the engine was neither."""
        lap("start")
        self._since = time.monotonic()

    def progress(self) -> float:
        """A number that grows with every generated token, every environment step and every finished group. Its name in
        the heartbeat is `progress`."""
        tokens = sum(source().get("generated_tokens", 0.0) for source in self._sources)
        return tokens + sum(self._counts.values())

    def __call__(self) -> dict[str, float]:
        with self._lock:
            seconds = dict(self._seconds)
            seconds[self._working] += time.monotonic() - self._since
        stats = {**dict(self._counts), "progress": self.progress()}
        for source in self._sources:
            stats.update(source())
        # Last: what an engine counts under one of these names would take its place.
        return stats | {"busy_s": seconds[True], "waiting_s": seconds[False]}
