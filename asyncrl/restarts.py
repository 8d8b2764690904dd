"""How often what dies is started again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

WITHIN_S = 3600.0


class Restarts:
    """At most `limit` in any hour: a run of weeks outlives what dies now and then, and not what dies at each start.

    Args:
        taken: when those before were, by `clock`.
    """

    def __init__(self, limit: int, taken: Sequence[float] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.taken, self._clock = limit, list(taken), clock

    @property
    def recent(self) -> int:
        """How many there were in the last hour."""
        now = self._clock()
        return sum(now - each < WITHIN_S for each in self.taken)

    def take(self) -> bool:
        """One more; or False where it would be one too many."""
        if self.recent >= self.limit:
            return False
        self.taken.append(self._clock())
        return True
