"""Ends the process of a worker whose loop has ended but that does not exit: a thread that an environment left behind
(`asyncio.to_thread` of a call without a deadline) is waited for without limit, and the pool would take the process for
a working worker.

consumes:     the end of the worker's loop
waits for:    the end of everything else: engine, rewards, connections, event loop
unblocked by: that, or `limit_s` without it: then the stacks of running threads are printed and the process exits
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Self

from asyncrl.rollout.host import EXIT_FAILED, EXIT_STOPPED
from asyncrl.rollout.worker.loop_watch import end_process

ENDING_S = 60.0
"""Together with half of `replay.wait_timeout_s` before it, less than the learner waits."""


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
