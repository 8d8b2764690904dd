"""Limits how often a process that dies is started again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

WITHIN_S = 3600.0


class Restarts:
    """At most `limit` restarts in any hour. A run of weeks survives a process that dies now and then, but ends when one
    dies at every start.

    Args:
        taken: times of earlier restarts, by `clock`.
    """

    def __init__(self, limit: int, taken: Sequence[float] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.taken, self._clock = limit, list(taken), clock

    @property
    def recent(self) -> int:
        """Restarts in the last hour."""
        now = self._clock()
        return sum(now - each < WITHIN_S for each in self.taken)

    def take(self) -> bool:
        """Count one more restart and return True; or False if it would exceed the limit."""
        if self.recent >= self.limit:
            return False
        self.taken.append(self._clock())
        return True
