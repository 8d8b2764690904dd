"""Awaits futures of a thread in an asyncio loop, with one wake-up for those that finish at about the same time.

`asyncio.wrap_future` wakes the loop for each future. With many small replies that takes as long as all other work for
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _Batch:
    """Futures that are done, and not yet seen by the loop."""

    loop: asyncio.AbstractEventLoop
    items: list[tuple[asyncio.Future[Any], Future[Any]]] = field(default_factory=list)


class Futures:
    """`of` is called in a loop; the futures may be completed by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batch: _Batch | None = None

    async def of(self, future: Future[Result]) -> Result:
        """Await the result; raises the future's exception. Cancelling stops the waiting, not the future."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[Result] = loop.create_future()
        future.add_done_callback(lambda done: self._note(loop, waiting, done))
        return await waiting

    def _note(self, loop: asyncio.AbstractEventLoop, waiting: asyncio.Future[Any], done: Future[Any]) -> None:
        with self._lock:
            batch = self._batch
            if batch is not None and batch.loop is loop:
                batch.items.append((waiting, done))  # The call scheduled for the batch's first item handles it.
                return
            batch = self._batch = _Batch(loop, [(waiting, done)])
        with contextlib.suppress(RuntimeError):  # The loop is closed: nothing waits.
            loop.call_soon_threadsafe(self._land, batch)

    def _land(self, batch: _Batch) -> None:
        with self._lock:
            if self._batch is batch:
                self._batch = None
        for waiting, done in batch.items:
            if waiting.done():
                continue
            error = done.exception()
            if error is None:
                waiting.set_result(done.result())
            else:
                waiting.set_exception(error)
