"""A clock that stands still while its process does: stopped (SIGSTOP, a frozen machine) or without CPU.

Whoever wakes up after that finds everybody's last word long ago and their newest ones unread. By the wall clock it
would take all of them for dead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from asyncrl.replay.config import ReplayConfig

log = logging.getLogger(__name__)

SHORTEST_S = 0.5
"""Longer than any turn of the loops that ask."""


class AwakeClock:
    """Seconds that this process ran for; to be asked at least every `limit_s`. Threads may share it.

    Args:
        limit_s: of a longer gap between two calls no more than this counts. Time goes on in a process that is merely
            slow, or it would never miss anybody.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._lock = threading.Lock()
        self._last, self._lost = clock(), 0.0

    def __call__(self) -> float:
        with self._lock:
            now = self._clock()
            gap, self._last = now - self._last, now
            if gap > self._limit_s:
                self._lost += gap - self._limit_s
                log.warning("this process did not run for %.1f s: that time is not counted as anybody's silence", gap)
            return now - self._lost


def awake_clock(config: ReplayConfig) -> AwakeClock:
    """After a standstill half of the silence that ends a peer is left for the words that wait to be read."""
    return AwakeClock(max(config.heartbeat_timeout_s / 2, SHORTEST_S))
