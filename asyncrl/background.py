"""One call on a thread of its own, which never keeps a process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Answer = TypeVar("Answer")


def in_background(name: str, ask: Callable[[], Answer]) -> Future[Answer]:
    """Call `ask` on a thread of its own; the future gets what it returns or raises."""
    future: Future[Answer] = Future()
    future.set_running_or_notify_cancel()  # a reader that gives up must not make the answer an error of the thread
    # A daemon thread, so that a process that fails meanwhile ends at once and does not wait for the call.
    threading.Thread(target=_ask, args=(ask, future), name=name, daemon=True).start()
    return future


def _ask(ask: Callable[[], Answer], future: Future[Answer]) -> None:
    try:
        future.set_result(ask())
    except BaseException as error:  # the thread ends here: any exception goes to the reader of the future
        future.set_exception(error)
