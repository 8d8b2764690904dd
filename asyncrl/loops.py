"""Event loops on threads of their own, and tasks that end together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from asyncrl.errors import EngineDiedError

T = TypeVar("T")


async def together(*tasks: asyncio.Task[Any]) -> list[Any]:
    """Return the results of all tasks. If one fails, or the caller is cancelled, all have ended when this raises: the
    others must not go on for nobody."""
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class LoopThread:
    """An event loop that never blocks the caller's, and that any thread may call into."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine from another thread; returns its result or raises its exception.

        Raises:
            EngineDiedError: no answer for `timeout_s`.
        """
        future = self.submit(coroutine)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            if future.done():
                raise
            future.cancel()
            raise EngineDiedError(f"the engine gave no answer for {timeout_s:g} s") from None

    def begin(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """As `call`, but closes the loop on failure, since no owner is left to do so."""
        try:
            return self.call(coroutine, timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
