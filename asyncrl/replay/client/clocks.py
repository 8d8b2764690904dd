"""Estimates the offset between the clocks of this machine and the replay server's, from the round trips of heartbeats
(RFC 5905, 8).

sent ──▶ the server reads its clocks ──▶ heard:   offset = server - (sent + heard) / 2, plus or minus half the trip
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from asyncrl import spans
from asyncrl.replay.codec.reply import ServerTime
from asyncrl.storage.memory import free_share

TRIPS = 30
"""Number of the last heartbeats of which the best is used: half a minute."""


class Clocks:
    def __init__(self, monotonic: Callable[[], int] = spans.now, wall: Callable[[], int] = time.time_ns) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._boot = spans.boot()
        self._sent = {-1: 0}
        self._trips: deque[tuple[int, int]] = deque(maxlen=TRIPS)
        """`(error, skew)` of the last heartbeats, in ns."""

    def sent(self, request: int) -> None:
        """Note that a heartbeat is being sent. Of several unanswered ones only the last counts."""
        self._sent = {request: self._monotonic()}

    def heard(self, request: int, server: ServerTime) -> None:
        """Note the answer to a heartbeat."""
        sent = self._sent.pop(request, None)
        if sent is None:
            return
        heard = self._monotonic()
        error = (heard - sent) // 2
        self._trips.append((error, server.wall - self._wall() + error))
        if server.boot != self._boot and error <= 2 * min(self._trips)[0]:  # slower trips waited in a queue
            spans.clocks(server.boot, server.monotonic - (sent + heard) // 2, error)

    def stats(self) -> dict[str, float]:
        """Return what goes with the next heartbeat: the absolute skew of the wall clocks in seconds, less the
        uncertainty of the trip, and the fraction of this machine's memory that is free."""
        free = free_share()
        told = {} if free is None else {"memory_free": free}
        if self._trips:
            error, skew = min(self._trips)
            told["clock_skew_s"] = max(0, abs(skew) - error) / 1e9
        return told
