"""Measure the share of time in which the server is idle, and record idle spans in the trace."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl import spans

LONG_NS = 5_000_000
"""Waits shorter than this get no span of their own: there would be thousands per second."""
SERVED_NS = 1_000_000_000
"""Longest span of work without a long wait. Recorded this often, so that the trace of a killed server has its work."""


class Idle:
    """Times the server's waits: each runs inside `with idle:`."""

    def __init__(self, clock: Callable[[], int] = spans.now) -> None:
        self._clock = clock
        self._began = self._asked = clock()
        self._waited = 0

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *_: object) -> None:
        now = self._clock()
        self._waited += now - self._began
        if now - self._began >= LONG_NS:
            spans.lap("serve", self._began)
            spans.lap("wait for messages", now)
        elif spans.since_lap() >= SERVED_NS:
            spans.lap("serve", now)

    def share(self) -> float:
        """Share of time spent waiting since the last call, from 0 to 1."""
        now = self._clock()
        span, waited = now - self._asked, self._waited
        self._asked, self._waited = now, 0
        return min(1.0, waited / span) if span > 0 else 0.0
