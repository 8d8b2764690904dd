"""Warns when calls wait and none is answered, as with a stalled judge, long before they are overdue."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 5.0


class Silence:
    """Checked every second or so. Warns after `PATIENCE_S`, and each time after twice as long, so that a slow function
    is reported only a few times."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = what, clock
        self._since = clock()
        self._patience, self._told, self._heard = PATIENCE_S, False, False

    def heard(self) -> None:
        """Record that a call was answered."""
        self._heard = True

    def look(self, calls: int) -> str:
        """Return the message due now, or an empty string; `calls` is the number of open calls."""
        now = self._clock()
        if self._heard or not calls:
            over = f"no longer waits for {self._what}, after {now - self._since:.0f} s" if self._told else ""
            self._since, self._heard, self._told = now, False, False
            return over
        if self._told or now - self._since < self._patience:
            return ""
        self._told, self._patience = True, 2 * self._patience
        moment = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - self._since)))
        return (
            f"waiting for {self._what} since {moment} ({now - self._since:.0f} s): none of {calls} calls was answered"
        )
