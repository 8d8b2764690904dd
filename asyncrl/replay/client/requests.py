"""Tracks the client's requests until they are answered: the order in which they are sent and resent, and byte credit.

Uses no socket and no clock. It runs in the connection's thread, which reports what it has sent and received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import WireError
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.together import MOST, MOST_BYTES, Asked


@dataclass(frozen=True, slots=True)
class Response:
    body: Any
    frames: Sequence[Frame]


@dataclass(slots=True, eq=False)
class Request(Asked):
    nbytes: int
    """Bytes counted against the byte credit while unanswered; 0 for requests that store nothing."""
    future: Future[Response]
    since: float
    """Time at which it was made, or at which the server last made progress while it waited for credit."""
    sent: bool = False


class Requests:
    """Unanswered requests, in the order of their numbers."""

    def __init__(self) -> None:
        self.window = 0
        """Limit on unanswered bytes, by the server's newest message."""
        self._outstanding: dict[int, Request] = {}
        self._unsent: deque[Request] = deque()
        self._unacknowledged = 0
        """Bytes sent and not answered yet."""
        self._progress = -1

    @property
    def oldest(self) -> int:
        """The lowest unanswered number. There must be an unanswered request."""
        return next(iter(self._outstanding))

    def get(self, number: int) -> Request | None:
        return self._outstanding.get(number)

    def sent(self) -> list[int]:
        return [number for number, request in self._outstanding.items() if request.sent]

    def add(self, request: Request) -> None:
        self._outstanding[request.number] = request
        self._unsent.append(request)

    def send(self, dispatch: Callable[[Sequence[Request]], bool]) -> None:
        """Send requests in order, several together. A group waits for credit, and requests without payload pass it.

        Args:
            dispatch: sends requests; returns False if they cannot be sent now. A request for which it raises WireError
                fails with it.
        """
        waiting: deque[Request] = deque()
        together: list[Request] = []
        nbytes = 0
        while self._unsent:
            request = self._unsent.popleft()
            if request.number not in self._outstanding:
                continue
            if not waiting and not self._has_credit(request):
                waiting += self._attempt(together, dispatch)  # first, since one that fails may free credit
                together, nbytes = [], 0
            if request.nbytes and (waiting or not self._has_credit(request)):
                waiting.append(request)
                continue
            together.append(request)
            self._note_sent(request, True)
            nbytes += request.nbytes
            if len(together) == MOST or nbytes >= MOST_BYTES:
                waiting += self._attempt(together, dispatch)
                together, nbytes = [], 0
        self._unsent = waiting + deque(self._attempt(together, dispatch))

    def _has_credit(self, request: Request) -> bool:
        """Return whether there is credit for a request. The first unacknowledged group may exceed the window, or it
        could never be sent."""
        if not request.nbytes:
            return True
        fits = self._unacknowledged + request.nbytes <= self.window
        return fits or (self._unacknowledged == 0 and self.window > 0)

    def _note_sent(self, request: Request, sent: bool) -> None:
        if request.sent != sent:
            request.sent = sent
            self._unacknowledged += request.nbytes if sent else -request.nbytes

    def _attempt(self, together: Sequence[Request], dispatch: Callable[[Sequence[Request]], bool]) -> list[Request]:
        """Send requests; returns those that cannot be sent now."""
        try:
            if not together or dispatch(together):
                return []
        except WireError as error:
            if len(together) > 1:  # one of them is at fault: send each by itself
                return [late for request in together for late in self._attempt([request], dispatch)]
            self.answered(together[0])
            together[0].future.set_exception(error)
            return []
        for request in together:
            self._note_sent(request, False)
        return list(together)

    def resend(self, numbers: Sequence[int]) -> None:
        """Send requests again that were lost, or whose answers were."""
        for number in numbers:
            request = self._outstanding.get(number)
            if request is not None and request.sent:
                self._note_sent(request, False)
                self._unsent.append(request)

    def resend_all(self) -> None:
        self.resend(list(self._outstanding))

    def server_at(self, progress: int, now: float) -> None:
        """Note the server's progress counter. If it has changed, the wait for credit is counted from `now`."""
        if progress != self._progress:
            self._progress = progress
            for request in self._unsent:
                request.since = now

    def answered(self, request: Request) -> None:
        del self._outstanding[request.number]
        self._note_sent(request, False)

    def take_overdue(self, now: float, contact: float, limit_s: float) -> list[tuple[Request, float]]:
        """Remove and return requests that have waited longer than `limit_s`, each with its wait in seconds: since
        `since`, or, if it was sent, since the server's last message at `contact` if that is later."""
        overdue: list[tuple[Request, float]] = []
        for request in list(self._outstanding.values()):
            waited = now - max(request.since, contact if request.sent else request.since)
            if waited > limit_s:
                self.answered(request)  # Frees its credit; otherwise later requests would wait forever.
                overdue.append((request, waited))
        return overdue

    def take_all(self) -> list[Request]:
        requests = list(self._outstanding.values())
        self._outstanding.clear()
        return requests
