"""Runs calls of user code that may never end on their own threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from asyncrl.background import in_background
from asyncrl.errors import EpisodeError

Result = TypeVar("Result")


def start_thread(function: Callable[[], Result], name: str) -> Future[Result]:
    """Start a thread and return the future of its outcome. The thread ends with the call, or with the process."""
    return in_background(name, partial(_harmless, function))


def _harmless(function: Callable[[], Result]) -> Result:
    """Call it. A StopIteration or an exit of user code would affect the event loop that waits, so they are replaced."""
    try:
        return function()
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise EpisodeError(f"{type(error).__name__}: {error}") from error


async def on_own_thread(function: Callable[[], Result], name: str) -> Result:
    """Run `function()`, but not on a thread of the pool: calls that never end would occupy all of them, and the worker
    waits for the pool too.

    waits for: the call; unblocked by: its end. The thread of a call that is given up is abandoned.
    """
    return await asyncio.wrap_future(start_thread(function, name))
