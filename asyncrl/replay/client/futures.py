"""Futures of a thread awaited in an asyncio loop; those that are done at about the same time with one wake-up.

`asyncio.wrap_future` wakes the loop for each. With many small replies that takes as long as all else done for them.
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
    """Done, and not yet seen by the loop."""

    loop: asyncio.AbstractEventLoop
    items: list[tuple[asyncio.Future[Any], Future[Any]]] = field(default_factory=list)


class Futures:
    """`of` is called in a loop; the futures are done in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batch: _Batch | None = None

    async def of(self, future: Future[Result]) -> Result:
        """The result, or what it failed with. Cancelled, the caller stops waiting; the future goes on."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[Result] = loop.create_future()
        future.add_done_callback(lambda done: self._note(loop, waiting, done))
        return await waiting

    def _note(self, loop: asyncio.AbstractEventLoop, waiting: asyncio.Future[Any], done: Future[Any]) -> None:
        with self._lock:
            batch = self._batch
            if batch is not None and batch.loop is loop:
                batch.items.append((waiting, done))  # Found by the call that the first one asked for.
                return
            batch = self._batch = _Batch(loop, [(waiting, done)])
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits.
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
