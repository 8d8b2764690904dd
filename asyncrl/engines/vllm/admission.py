"""Limits how many sequences vLLM gets at once: between two watermarks of its KV cache, oldest first.

This is only vLLM's part of the concurrency: see `asyncrl/rollout/worker/concurrency.py` for all of it.

Without a limit vLLM accepts everything, runs out of blocks and preempts: preempted sequences are prefilled again, and
under load that can be most of the work.
"""

from __future__ import annotations

import asyncio
import heapq


class AdmissionWindow:
    """Additive increase, multiplicative decrease of `limit`, the number of sequences that may be in flight.

    The increase is per finished sequence, not per step: a sequence's KV cache grows for as long as it runs, so free
    blocks seen now belong to the sequences that have started. Until the first cut every finished sequence widens a full
    window by one; afterwards a whole window of them does.

    Args:
        largest: upper bound of the limit (engine.max_sequences).
        low, high: watermarks of the KV usage. Below `low` a full window grows, above `high` it is cut.
        cut: factor of a cut.
    """

    def __init__(self, largest: int, *, low: float = 0.75, high: float = 0.92, cut: float = 0.75) -> None:
        self.limit = largest
        self._largest, self._low, self._high, self._cut = largest, low, high, cut
        self._usage = 0.0
        self._preemptions = 0
        self._was_cut = False
        self._credit = 0
        """Sequences that finished since the window last grew."""
        self._draining = False
        """Whether the last cut has not taken effect yet: cutting again meanwhile would end at 1 within a few steps."""

    def begin(self, kv_tokens: int, longest: int) -> None:
        """Start with as many sequences as fit if each gets as long as the first may get: coming down from too many
        takes a storm of preemptions."""
        if kv_tokens:  # vLLM reports it for every model with a paged cache
            self.limit = min(self._largest, max(1, kv_tokens // longest))

    def observe(self, in_flight: int, usage: float, preemptions: int) -> None:
        """Update the limit; called after each step.

        Args:
            usage: fraction of KV blocks in use, in [0, 1].
            preemptions: sequences preempted since the start; vLLM preempts the one admitted last.
        """
        self._usage = usage
        preempted = preemptions > self._preemptions
        self._preemptions = preemptions
        self._draining = self._draining and in_flight > self.limit
        if (usage > self._high or preempted) and not self._draining:
            self.limit = max(1, int(min(self.limit, in_flight) * self._cut))
            self._draining = in_flight > self.limit
            self._was_cut, self._credit = True, 0

    def finished(self, in_flight: int) -> None:
        """Called after each finished sequence, which `in_flight` still counts."""
        if self._usage > self._low or in_flight < self.limit:
            return
        self._credit += 1
        if self._credit >= (self.limit if self._was_cut else 1):
            self.limit, self._credit = min(self._largest, self.limit + 1), 0


class AdmissionQueue:
    """Sequences wait here for a slot in the window, the oldest first, so the youngest are held back. One event loop.

    A closed queue admits none: weights are being loaded.
    """

    def __init__(self, window: AdmissionWindow) -> None:
        self.window = window
        self.in_flight = 0
        self._closed = False
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def waiting(self) -> int:
        return sum(not place.done() for _, place in self._waiting)

    async def enter(self, ticket: int) -> None:
        """waits for: a slot, that is the end of a sequence, or of the load in progress; unblocked by: `leave`, `open`,
        a wider window. Cancel the task to give up. Tickets are unique; a smaller one goes first."""
        place = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (ticket, place))
        self.admit()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave()  # admitted and cancelled at the same moment
            raise

    def leave(self) -> None:
        self.window.finished(self.in_flight)
        self.in_flight -= 1
        self.admit()

    def close(self) -> None:
        self._closed = True

    def open(self) -> None:
        self._closed = False
        self.admit()

    def admit(self) -> None:
        """Admit as many as the window allows now."""
        while self._waiting and not self._closed and self.in_flight < self.window.limit:
            _, place = heapq.heappop(self._waiting)
            if not place.done():
                self.in_flight += 1
                place.set_result(None)
