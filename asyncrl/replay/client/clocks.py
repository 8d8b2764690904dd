"""How the clocks of this machine and of the replay server's differ, from the round trips of heartbeats (RFC 5905, 8).

sent ──▶ the server reads its clocks ──▶ heard:   offset = server - (sent + heard) / 2, give or take half the trip
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from asyncrl import spans
from asyncrl.replay.codec.reply import ServerTime
from asyncrl.storage.memory import free_share

TRIPS = 30
"""Heartbeats that the best is taken of: half a minute."""


class Clocks:
    def __init__(self, monotonic: Callable[[], int] = spans.now, wall: Callable[[], int] = time.time_ns) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._boot = spans.boot()
        self._sent = {-1: 0}
        self._trips: deque[tuple[int, int]] = deque(maxlen=TRIPS)
        """`(error, skew)` in ns, of the last ones."""

    def sent(self, request: int) -> None:
        """A heartbeat leaves. Of those without an answer only the last counts."""
        self._sent = {request: self._monotonic()}

    def heard(self, request: int, server: ServerTime) -> None:
        """Its answer came."""
        sent = self._sent.pop(request, None)
        if sent is None:
            return
        heard = self._monotonic()
        error = (heard - sent) // 2
        self._trips.append((error, server.wall - self._wall() + error))
        if server.boot != self._boot and error <= 2 * min(self._trips)[0]:  # others stood in a queue somewhere
            spans.clocks(server.boot, server.monotonic - (sent + heard) // 2, error)

    def stats(self) -> dict[str, float]:
        """What goes with the next heartbeat: by how much the server's clock is ahead, as far as the trips can tell, and
        what of this machine's memory is free."""
        free = free_share()
        told = {} if free is None else {"memory_free": free}
        if self._trips:
            error, skew = min(self._trips)
            told["clock_skew_s"] = max(0, abs(skew) - error) / 1e9
        return told
