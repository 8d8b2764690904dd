"""Says that calls wait and none is answered, as by a judge that stands still: long before they are overdue."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 5.0


class Silence:
    """To be asked every second or so. Told after `PATIENCE_S`, and each time after twice as long: what is slow always
    is told a few times."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = what, clock
        self._since = clock()
        self._patience, self._told, self._heard = PATIENCE_S, False, False

    def heard(self) -> None:
        """A call was answered."""
        self._heard = True

    def look(self, calls: int) -> str:
        """What is to be said now; so many calls are open."""
        now = self._clock()
        if self._heard or not calls:
            over = f"waits for {self._what} no longer, after {now - self._since:.0f} s" if self._told else ""
            self._since, self._heard, self._told = now, False, False
            return over
        if self._told or now - self._since < self._patience:
            return ""
        self._told, self._patience = True, 2 * self._patience
        moment = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - self._since)))
        return (
            f"waits for {self._what} since {moment}, {now - self._since:.0f} s ago: of {calls} calls none was answered"
        )
