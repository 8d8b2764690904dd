"""Requests that wait for a condition at the server: retried once it holds, ended at their deadline.

consumes      requests that the handlers could not answer yet
waits for     nobody; the server calls `settle` after each batch of messages, at the latest at the `nearest` deadline
unblocked by  `changed` or an event of the core, if the condition holds by then; or the deadline of the request

After each change every condition (`Later.there`) is checked once for all requests that wait for it, not once per
request: a thousand workers and all ranks of a learner wait most of the time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from asyncrl.errors import AsyncRLError, WireError
from asyncrl.replay.server.outbox import Replies
from asyncrl.replay.server.sessions import Later, Session

MAX_PATIENT = 64
"""Limit on waiting requests of one peer."""
SPARE = 64
"""Deadlines of answered requests that may stay in the heap beyond the number of waiting requests, before the heap is
rebuilt without them."""


@dataclass(slots=True, eq=False)
class _Waiting:
    number: int
    session: Session
    request: int
    verb: str
    later: Later
    deadline: float


class WaitingRequests:
    """The waiting requests of all peers.

    Args:
        applied: returns the number of events so far, see `Progress`.
        clock: the server's clock.
    """

    def __init__(self, applied: Callable[[], int], replies: Replies, clock: Callable[[], float]) -> None:
        self._count, self._replies, self._clock = applied, replies, clock
        self.changed = False
        """Set when something changed that a request may wait for, other than by an event of the core."""
        self._applied = 0
        """Number of events at the last retry."""
        self._numbers = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        """Requests by number, in order of arrival."""
        self._for: dict[Hashable, dict[int, _Waiting]] = {}
        """The same requests, by the condition they wait for (`Later.what`)."""
        self._deadlines: list[tuple[float, int]] = []
        """Heap of (deadline, number). May contain requests that are answered already."""

    def add(self, session: Session, request: int, verb: str, later: Later) -> None:
        """Add a request. Raises WireError if too many requests of this peer wait already."""
        if session.patient >= MAX_PATIENT:
            raise WireError(f"{session.patient} requests of this peer are waiting already; no more are accepted")
        session.patient += 1
        session.waiting.add(request)
        deadline = self._clock() + later.wait_s
        self._put(_Waiting(next(self._numbers), session, request, verb, later, deadline))

    def forget(self, session: Session) -> None:
        """Remove all requests of a peer that is gone, without an answer."""
        for waiting in [waiting for waiting in self._waiting.values() if waiting.session is session]:
            self._remove(waiting)

    def nearest(self) -> float:
        """The next deadline; infinity if no request waits."""
        while self._deadlines and not self._is_current(*self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def settle(self) -> None:
        """If anything has changed, retry the requests whose condition holds; end the requests whose time is up."""
        now = self._clock()
        while (changed := self._something_changed()) or self.nearest() <= now:
            self.changed, self._applied = False, self._count()
            if changed:
                for what in list(self._for):
                    self._ask_all(what, now)
            while self.nearest() <= now:
                self._settle(self._waiting[self._deadlines[0][1]], now)

    def _something_changed(self) -> bool:
        return self.changed or self._count() != self._applied

    def _ask_all(self, what: Hashable, now: float) -> None:
        """Retry all requests with this condition, until it no longer holds: what the first one takes, the next cannot
        have."""
        for waiting in tuple(self._for[what].values()):
            if not self._is_there(what):
                return
            self._settle(waiting, now)

    def _is_there(self, what: Hashable) -> bool:
        first = next(iter(self._for.get(what, {}).values()), None)
        try:
            return first is not None and first.later.there()
        except AsyncRLError:
            return True  # `retry` raises it again, so that each request gets the error

    def _settle(self, waiting: _Waiting, now: float) -> None:
        """Answer the request or grant it more time; otherwise it goes on waiting."""
        session, later = waiting.session, waiting.later
        try:
            answer = later.retry()
            if answer is None and waiting.deadline > now:
                return
            final = answer or later.at_deadline()
            self._remove(waiting)
            if isinstance(final, Later):
                waiting.later, waiting.deadline = final, now + final.wait_s
                self._put(waiting)
                return
            session.waiting.discard(waiting.request)
            self._replies.answer(session, waiting.request, waiting.verb, final)
        except AsyncRLError as error:
            self._remove(waiting)
            session.waiting.discard(waiting.request)
            self._replies.error(session, waiting.request, error)
        session.patient -= 1

    def _put(self, waiting: _Waiting) -> None:
        self._waiting[waiting.number] = waiting
        self._for.setdefault(waiting.later.what, {})[waiting.number] = waiting
        heapq.heappush(self._deadlines, (waiting.deadline, waiting.number))
        if len(self._deadlines) > 2 * len(self._waiting) + SPARE:
            self._deadlines = [entry for entry in self._deadlines if self._is_current(*entry)]
            heapq.heapify(self._deadlines)

    def _remove(self, waiting: _Waiting) -> None:
        """Remove a request. Does nothing if it is gone already."""
        if self._waiting.pop(waiting.number, None) is None:
            return
        others = self._for[waiting.later.what]
        del others[waiting.number]
        if not others:
            del self._for[waiting.later.what]

    def _is_current(self, deadline: float, number: int) -> bool:
        waiting = self._waiting.get(number)
        return waiting is not None and waiting.deadline == deadline
