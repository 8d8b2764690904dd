"""Decide when the server of a finished run may exit: once its members have left and its shards know of it."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.replay.journal.durable import RESUME_S

GRACE_S = 1.0
"""Seconds that the server stays after the last goodbye, so that a peer can repeat a request whose answer was lost."""
LEAVE_S = 5.0
"""Seconds that the server of a finished run waits for its shards to hear of it; they ask several times a second."""


class Shutdown:
    """Tracks how long a finished run has had no members. `over`: the shards may exit."""

    def __init__(self, finished: bool) -> None:
        self.over = False
        self._quiet_since: float | None = None
        # A run that was finished before this start is being resumed, or its workers have yet to be told.
        self._grace_s = RESUME_S if finished else GRACE_S

    def look(self, finished: bool, present: Sequence[str], now: float) -> bool:
        """Return whether the server may exit.

        Args:
            present: the roles of the peers that have not left.
        """
        members = len(present) - present.count("shard")
        if not finished or members:
            self._quiet_since, self.over = None, False
            self._grace_s = GRACE_S if members else self._grace_s
            return False
        self._quiet_since = self._quiet_since or now
        quiet_s = now - self._quiet_since
        self.over = quiet_s > self._grace_s
        return self.over and (not present or quiet_s > self._grace_s + LEAVE_S)
