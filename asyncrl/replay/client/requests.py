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
from asyncrl.replay.codec.together import MOST, MOST_BYTES


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

    def send(self, dispatch: Callable[[Sequence[Request]], bool]) -> None:
        """In order, several at once; a group waits for its credit and lets requests without payload pass.

        Args:
            dispatch: False when these requests cannot be sent now. A WireError of it ends the one that it is of.
        """
        waiting: deque[Request] = deque()
        together: list[Request] = []
        nbytes = 0
        while self._unsent:
            request = self._unsent.popleft()
            if request.number not in self._outstanding:
                continue
            if not waiting and not self._has_credit(request):
                waiting += self._attempt(together, dispatch)  # before it, or one of them fails and gives it credit
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
        """The first unacknowledged group may be larger than the window, or it could never be sent."""
        if not request.nbytes:
            return True
        fits = self._unacknowledged + request.nbytes <= self.window
        return fits or (self._unacknowledged == 0 and self.window > 0)

    def _note_sent(self, request: Request, sent: bool) -> None:
        if request.sent != sent:
            request.sent = sent
            self._unacknowledged += request.nbytes if sent else -request.nbytes

    def _attempt(self, together: Sequence[Request], dispatch: Callable[[Sequence[Request]], bool]) -> list[Request]:
        """Those that cannot be sent now."""
        try:
            if not together or dispatch(together):
                return []
        except WireError as error:
            if len(together) > 1:  # one of them: the others go without it
                return [late for request in together for late in self._attempt([request], dispatch)]
            self.answered(together[0])
            together[0].future.set_exception(error)
            return []
        for request in together:
            self._note_sent(request, False)
        return list(together)

    def resend(self, numbers: Sequence[int]) -> None:
        """These were lost, or their answers were."""
        for number in numbers:
            request = self._outstanding.get(number)
            if request is not None and request.sent:
                self._note_sent(request, False)
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
        self._note_sent(request, False)

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
