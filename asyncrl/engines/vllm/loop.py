"""An event loop on its own thread: vLLM never blocks the worker's loop, and any thread may call in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from asyncrl.errors import EngineDiedError

T = TypeVar("T")


class LoopThread:
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
