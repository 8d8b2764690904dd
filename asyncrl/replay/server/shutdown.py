"""Decide when the server of a finished run may exit: once its members have left."""

from __future__ import annotations

from asyncrl.replay.journal.durable import RESUME_S

GRACE_S = 1.0
"""Seconds that the server stays after the last goodbye, so that a peer can repeat a request whose answer was lost."""


class Shutdown:
    """Tracks how long a finished run has had no members."""

    def __init__(self, finished: bool) -> None:
        self._quiet_since: float | None = None
        # A run that was finished before this start is being resumed, or its workers have yet to be told.
        self._grace_s = RESUME_S if finished else GRACE_S

    def look(self, finished: bool, members: bool, now: float) -> bool:
        """Return whether the server may exit.

        Args:
            members: whether a peer has not left.
        """
        if not finished or members:
            self._quiet_since = None
            self._grace_s = GRACE_S if members else self._grace_s
            return False
        self._quiet_since = self._quiet_since or now
        return now - self._quiet_since > self._grace_s
