"""The client's requests until they are answered: the order in which they go out, on what byte credit, and again.

No socket and no clock: all of it happens in the thread of the connection, which tells what it sent and heard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import WireError
from asyncrl.replay.codec.columns import Frame


@dataclass(frozen=True, slots=True)
class Response:
    body: Any
    frames: Sequence[Frame]


@dataclass(slots=True, eq=False)
class Request:
    number: int
    verb: str
    body: Any
    frames: Sequence[Frame]
    nbytes: int
    """Counted against the byte credit while unanswered; 0 for requests that store nothing."""
    future: Future[Response]
    since: float
    """When it was made, or when the server last moved while it waited for credit."""
    sent: bool = False


class Requests:
    """Those that have no answer yet, in the order of their numbers."""

    def __init__(self) -> None:
        self.window = 0
        """Bytes without an answer that the server allows, by its newest word."""
        self._outstanding: dict[int, Request] = {}
        self._unsent: deque[Request] = deque()
        self._unacknowledged = 0
        """Bytes sent that have no answer yet."""
        self._progress = -1

    @property
    def oldest(self) -> int:
        """All below this number are answered. There must be one that is not."""
        return next(iter(self._outstanding))

    def get(self, number: int) -> Request | None:
        return self._outstanding.get(number)

    def sent(self) -> list[int]:
        return [number for number, request in self._outstanding.items() if request.sent]

    def add(self, request: Request) -> None:
        self._outstanding[request.number] = request
        self._unsent.append(request)

    def send(self, dispatch: Callable[[Request], bool]) -> None:
        """In order; a group waits for its credit and lets requests without payload pass.

        Args:
            dispatch: False when the request cannot be sent now. A WireError of it ends the request.
        """
        waiting: deque[Request] = deque()
        while self._unsent:
            request = self._unsent.popleft()
            if request.number not in self._outstanding:
                continue
            if (waiting and request.nbytes) or not self._has_credit(request) or not self._attempt(request, dispatch):
                waiting.append(request)
        self._unsent = waiting

    def _has_credit(self, request: Request) -> bool:
        """The first unacknowledged group may be larger than the window, or it could never be sent."""
        if not request.nbytes:
            return True
        fits = self._unacknowledged + request.nbytes <= self.window
        return fits or (self._unacknowledged == 0 and self.window > 0)

    def _attempt(self, request: Request, dispatch: Callable[[Request], bool]) -> bool:
        try:
            sent = dispatch(request)
        except WireError as error:
            del self._outstanding[request.number]
            request.future.set_exception(error)
            return True
        if sent:
            request.sent = True
            self._unacknowledged += request.nbytes
        return sent

    def resend(self, numbers: Sequence[int]) -> None:
        """These were lost, or their answers were."""
        for number in numbers:
            request = self._outstanding.get(number)
            if request is not None and request.sent:
                request.sent = False
                self._unacknowledged -= request.nbytes
                self._unsent.append(request)

    def resend_all(self) -> None:
        self.resend(list(self._outstanding))

    def server_at(self, progress: int, now: float) -> None:
        """Where the server has moved, what waits for credit waits from now."""
        if progress != self._progress:
            self._progress = progress
            for request in self._unsent:
                request.since = now

    def answered(self, request: Request) -> None:
        del self._outstanding[request.number]
        if request.sent:
            self._unacknowledged -= request.nbytes

    def take_overdue(self, now: float, contact: float, limit_s: float) -> list[tuple[Request, float]]:
        """Those that have waited longer, and for how long: since they were made, or since the server's last word at
        `contact` once they were sent."""
        overdue: list[tuple[Request, float]] = []
        for request in list(self._outstanding.values()):
            waited = now - max(request.since, contact if request.sent else request.since)
            if waited > limit_s:
                self.answered(request)  # Without its bytes as credit again, those after it would wait for ever.
                overdue.append((request, waited))
        return overdue

    def take_all(self) -> list[Request]:
        requests = list(self._outstanding.values())
        self._outstanding.clear()
        return requests
