"""Runs calls of user code that may never end on their own threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from asyncrl.errors import EpisodeError

Result = TypeVar("Result")


def start_thread(function: Callable[[], Result], name: str) -> Future[Result]:
    """Start a thread and return the future of its outcome. The thread ends with the call, or with the process."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        # User code at a thread boundary: any exception goes to the waiting caller. A StopIteration or an exit would
        # affect the event loop.
        except BaseException as error:
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            future.set_exception(error if plain else EpisodeError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def on_own_thread(function: Callable[[], Result], name: str) -> Result:
    """Run `function()`, but not on a thread of the pool: calls that never end would occupy all of them, and the worker
    waits for the pool too.

    waits for: the call; unblocked by: its end. The thread of a call that is given up is abandoned.
    """
    return await asyncio.wrap_future(start_thread(function, name))
