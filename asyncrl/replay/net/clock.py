"""A clock that stops while its process does not run: stopped (SIGSTOP, a frozen machine) or without CPU.

A process that resumes has last heard from its peers long ago, and has not read their newest messages yet. By the wall
clock it would take all of them for dead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from asyncrl.settings.replay import ReplayConfig

log = logging.getLogger(__name__)

SHORTEST_S = 0.5
"""Lower bound on `limit_s` in seconds: longer than any turn of the loops that read the clock."""


class AwakeClock:
    """Returns the seconds for which this process has run; must be called at least every `limit_s`. Thread-safe.

    Args:
        limit_s: a longer gap between two calls counts as this many seconds. It is not 0, because a process that is
            merely slow must still notice silent peers.
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
                log.warning(
                    "this process did not run for %.1f s. That time does not count as silence of its peers", gap
                )
            return now - self._lost


def awake_clock(config: ReplayConfig) -> AwakeClock:
    """Return a clock for `config`. After a standstill, half of `heartbeat_timeout_s` is left to read the waiting
    messages before a peer counts as dead."""
    return AwakeClock(max(config.heartbeat_timeout_s / 2, SHORTEST_S))
