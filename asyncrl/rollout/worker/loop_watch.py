"""Ends a worker whose event loop hangs: its heartbeats come from another thread, and would continue for ever.

consumes:     turns of the loop
waits for:    the next turn
unblocked by: a turn, or `limit_s` without any: then the stack of the loop's thread is printed and the process exits,
              and its pool starts another worker
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Self

from asyncrl.rollout.host import EXIT_FAILED

log = logging.getLogger(__name__)

TURN_S = 1.0
WARN_S = 10.0
"""Seconds without a turn after which the stack of the loop's thread is logged."""


def end_process(said: str, code: int = EXIT_FAILED) -> None:
    print(said, flush=True)
    os._exit(code)


class LoopWatch:
    """`with LoopWatch(limit_s=150): ...` in the thread of a running loop.

    Args:
        limit_s: limit on the seconds without a turn, as counted by the watching thread (not while stopped).
        end: called with the message, from the watching thread.
    """

    def __init__(self, *, limit_s: float, turn_s: float = TURN_S, end: Callable[[str], None] = end_process) -> None:
        self._limit_s, self._turn_s, self._end = limit_s, turn_s, end
        self._turns = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)

    def __enter__(self) -> Self:
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._turn()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._timer.cancel()
        self._thread.join()

    def _turn(self) -> None:
        self._turns += 1
        self._timer = self._loop.call_later(self._turn_s, self._turn)

    def _watch(self) -> None:
        seen, still_s = 0, 0.0
        while not self._closed.wait(self._turn_s):
            before, still_s = still_s, still_s + self._turn_s
            if self._turns != seen:
                seen, still_s = self._turns, 0.0
            elif still_s >= self._limit_s:
                self._end(f"{self._held(still_s)}\nended after half of replay.wait_timeout_s")
                return
            elif before < WARN_S <= still_s:
                log.warning("%s", self._held(still_s))

    def _held(self, still_s: float) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        return (
            f"the event loop has not turned for {still_s:.0f} s. An environment must not block it; it is here:\n{stack}"
        )
