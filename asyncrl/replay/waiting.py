"""The requests that wait for something to happen at the server: asked again after each change, ended at their deadline.

consumes      what the desk could not answer yet
waits for     nobody; the server asks `settle` after each batch of messages, and at the `nearest` deadline at the latest
unblocked by  `changed`, an event of the core, or the deadline of the request
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from asyncrl.errors import AsyncRLError, WireError
from asyncrl.replay.session import Answer, Later, Session

MAX_PATIENT = 64
"""Requests of one peer that wait for something to happen; each is looked at with every change."""


@dataclass(slots=True, eq=False)
class _Waiting:
    session: Session
    request: int
    verb: str
    later: Later
    deadline: float


class Answering(Protocol):
    """Where their answers go: `Replies`."""

    def answer(self, session: Session, request: int, verb: str, answer: Answer, /) -> None: ...

    def error(self, session: Session, request: int, error: AsyncRLError, /) -> None: ...


class WaitingRequests:
    """`applied`: how many events there were, see `Progress`. `clock` is the server's."""

    def __init__(self, applied: Callable[[], int], replies: Answering, clock: Callable[[], float]) -> None:
        self._count, self._replies, self._clock = applied, replies, clock
        self.changed = False
        """Something that they may depend on, other than an event of the core's state."""
        self._applied = 0
        """Events applied when they were last asked."""
        self._waiting: list[_Waiting] = []

    def add(self, session: Session, request: int, verb: str, later: Later) -> None:
        """Raises WireError when too many of this peer wait already."""
        if session.patient >= MAX_PATIENT:
            raise WireError(f"{session.patient} requests of this peer wait already; one more is not taken")
        session.patient += 1
        session.waiting.add(request)
        self._waiting.append(_Waiting(session, request, verb, later, self._clock() + later.wait_s))

    def forget(self, session: Session) -> None:
        """Its peer is gone: no answer."""
        self._waiting = [waiting for waiting in self._waiting if waiting.session is not session]

    def nearest(self) -> float:
        """The next deadline; infinity when nobody waits."""
        return min((waiting.deadline for waiting in self._waiting), default=math.inf)

    def settle(self) -> None:
        """Ask them again if anything has changed; end those whose time is up."""
        now = self._clock()
        while self._something_changed() or any(waiting.deadline <= now for waiting in self._waiting):
            changed, self.changed, self._applied = self._something_changed(), False, self._count()
            before, self._waiting = self._waiting, []
            for waiting in before:
                if not (changed or waiting.deadline <= now) or not self._settled(waiting, now):
                    self._waiting.append(waiting)

    def _something_changed(self) -> bool:
        return self.changed or self._count() != self._applied

    def _settled(self, waiting: _Waiting, now: float) -> bool:
        session, later = waiting.session, waiting.later
        try:
            answer = later.retry()
            if answer is None and waiting.deadline > now:
                return False
            final = answer or later.at_deadline()
            if isinstance(final, Later):
                waiting.later, waiting.deadline = final, now + final.wait_s
                return False
            session.waiting.discard(waiting.request)
            self._replies.answer(session, waiting.request, waiting.verb, final)
        except AsyncRLError as error:
            session.waiting.discard(waiting.request)
            self._replies.error(session, waiting.request, error)
        session.patient -= 1
        return True
