"""Ends a worker that hangs. Its heartbeats come from another thread and would continue for ever, and the pool would
take it for a working one.

`LoopWatch`: the event loop has not turned for `limit_s` (an environment blocks it).
`EndWatch`: the loop has ended, but the process does not exit for `limit_s`: a thread that an environment left behind
(`asyncio.to_thread` of a call without a deadline) is waited for without limit.

consumes:     turns of the loop; its end
waits for:    the next turn; after the end, everything else: engine, rewards, connections, event loop
unblocked by: that, or `limit_s` without it: then the stacks of the threads are printed and the process exits; its pool
              starts another worker
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

from asyncrl.rollout.host import EXIT_FAILED, EXIT_STOPPED

log = logging.getLogger(__name__)

TURN_S = 1.0
WARN_S = 10.0
"""Seconds without a turn after which the stack of the loop's thread is logged."""
ENDING_S = 60.0
"""Together with half of `replay.wait_timeout_s` before it, less than the learner waits."""


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


class EndWatch:
    """`with watch: ...` around the loop; call `watch.over()` when everything else has ended too.

    Args:
        end: called with the message and the exit code, from another thread.
    """

    def __init__(self, *, limit_s: float = ENDING_S, end: Callable[[str, int], None] = end_process) -> None:
        self._limit_s, self._end = limit_s, end
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        self._timer = threading.Timer(self._limit_s, self._late, (error,))
        self._timer.daemon = True
        self._timer.start()

    def over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def _late(self, error: BaseException | None) -> None:
        said = [f"the worker's loop ended {self._limit_s:.0f} s ago, and this still runs:\n", *_stacks()]
        # Its error comes last, because the pool shows the last line. A restart finds out whether it can help.
        said += traceback.format_exception(error) if error is not None else ()
        self._end("".join(said), EXIT_STOPPED if error is None else EXIT_FAILED)


def _stacks() -> list[str]:
    frames, own = sys._current_frames(), threading.get_ident()
    return [
        f"thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident], limit=8))}"
        for thread in threading.enumerate()
        if thread.ident in frames and thread.ident != own
    ]
