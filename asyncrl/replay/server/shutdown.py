"""When the server of a finished run may go: once its members have left, and its shards have heard of it."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.replay.journal.durable import RESUME_S

GRACE_S = 1.0
"""After the last goodbye, so that a lost answer can still be asked for again."""
LEAVE_S = 5.0
"""How long a server whose run is over waits for its shards to hear of it; they ask several times a second."""


class Shutdown:
    """`over`: the shards may go."""

    def __init__(self, finished: bool) -> None:
        self.over = False
        self._quiet_since: float | None = None
        # A run that was over before this start is being resumed, or its workers are still to be told.
        self._grace_s = RESUME_S if finished else GRACE_S

    def look(self, finished: bool, present: Sequence[str], now: float) -> bool:
        """Whether the server may go.

        Args:
            present: the roles of those who have not left.
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
