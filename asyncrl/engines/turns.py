"""Pinned requests and loads of weights take turns, so that neither spans nor starves the other. One event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncrl.errors import WeightsError


class Turns:
    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._pinned = 0
        self._loads = 0

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[None]:
        """waits for: loads that came first, each bounded by itself; unblocked by: their end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._loads == 0)
            self._pinned += 1
        try:
            yield
        finally:
            async with self._changed:
                self._pinned -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def load(self, timeout_s: float) -> AsyncIterator[None]:
        """waits for: pinned requests that run; unblocked by: their end, or the deadline.

        Raises:
            WeightsError: they ran longer than `timeout_s`.
        """
        self._loads += 1
        try:
            async with self._changed:
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._changed.wait_for(lambda: self._pinned == 0)
                except TimeoutError:
                    raise WeightsError(
                        f"weights were not loaded: waited {timeout_s:g} s for {self._pinned} pinned requests. Make "
                        "evaluation chunks smaller"
                    ) from None
            yield
        finally:
            self._loads -= 1
            async with self._changed:
                self._changed.notify_all()
