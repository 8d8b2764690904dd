"""Waits for what a thread or a process does, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def until(
    happened: Callable[[], Found],
    why: Callable[[], object] | str = "it did not happen",
    *,
    within_s: float = 60.0,
    holds: Callable[[], object] = lambda: True,
) -> Found:
    """Wait until `happened()` is true, and return what it returned.

    Args:
        why: what a test that waits in vain says, or a function that returns it then.
        holds: must be true for as long as it waits, such as that the process is alive.
    """
    deadline = time.monotonic() + within_s
    while True:
        over = not holds() or time.monotonic() > deadline  # asked first: it may happen just before the end
        if found := happened():
            return found
        assert not over, why() if callable(why) else why
        time.sleep(0.01)
