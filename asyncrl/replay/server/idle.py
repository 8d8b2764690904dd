"""How much of its time the server has nothing to do; in a trace, when."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl import spans

LONG_NS = 5_000_000
"""Shorter waits are no spans of their own: thousands a second would be."""
SERVED_NS = 1_000_000_000
"""Work without a long wait is told so often: a server that is killed has told what it did."""


class Idle:
    """`with idle:` around each wait."""

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
        """Of the time since it was asked the last time."""
        now = self._clock()
        span, waited = now - self._asked, self._waited
        self._asked, self._waited = now, 0
        return min(1.0, waited / span) if span > 0 else 0.0
