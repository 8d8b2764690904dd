"""`python -m asyncrl.rewards.child KIND FUNCTION MODEL PROGRESS_FD PARENT_PID`: where a function of the user runs.

consumes:     calls from the pipe on standard input
waits for:    the next call, without a deadline: the pool owns the deadlines and kills this process past one
unblocked by: the pool writing, or closing the pipe (end of file: exit)

User code may print, crash, hang or exit here; none of it reaches the rollout worker.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from asyncrl.errors import AsyncRLError
from asyncrl.rewards.filters import FinishedGroup, make_filter
from asyncrl.rewards.loader import make_reward
from asyncrl.rewards.score import RewardScore
from asyncrl.rewards.wire import PROGRESS_BYTES, FrameBuffer, begin_call, end_call, pack_frame

READ_BYTES = 1 << 20
FLUSH_S = 0.005
"""Results wait at most this long for the end of their batch."""
PR_SET_PDEATHSIG = 1


def reward_answers(function: str, model: str) -> Callable[..., Any]:
    """`(completions, row) -> [[value, parts] or why there is none, ...]`"""
    reward = make_reward(function, model)

    def answer(completions: list[str], row: dict[str, Any]) -> list[Any]:
        outcomes = reward(completions, row)
        return [[o.value, o.parts] if isinstance(o, RewardScore) else str(o) for o in outcomes]

    return answer


def filter_answers(function: str, model: str) -> Callable[..., Any]:
    """`(fields of a FinishedGroup) -> [keep, why not]`"""
    judge = make_filter(function)

    def answer(fields: dict[str, Any]) -> list[Any]:
        verdict = judge(FinishedGroup(**fields))
        return [verdict.keep, verdict.why]

    return answer


KINDS = {"reward": reward_answers, "filter": filter_answers}


def main(kind: str, function: str, model: str, progress_fd: int, parent_pid: int) -> int:
    calls_fd, results_fd = _take_pipes()
    _die_with_parent(parent_pid)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    progress = mmap.mmap(progress_fd, PROGRESS_BYTES)
    try:
        answers = KINDS[kind](function, model)
    except AsyncRLError as error:
        _write(results_fd, pack_frame(["refused", str(error)]))
        return 2
    _write(results_fd, pack_frame(["ready"]))
    _serve(answers, calls_fd, results_fd, progress)
    return 0


def _serve(answers: Callable[..., Any], calls_fd: int, results_fd: int, progress: mmap.mmap) -> None:
    buffer = FrameBuffer()
    while data := os.read(calls_fd, READ_BYTES):
        results: list[bytes] = []
        flushed = time.monotonic()
        for call_id, *arguments in buffer.feed(data):
            begin_call(progress, call_id)
            answer = _answer(functools.partial(answers, *arguments))
            end_call(progress)
            results.append(pack_frame([call_id, answer]))
            if time.monotonic() - flushed > FLUSH_S:
                _write(results_fd, b"".join(results))
                results, flushed = [], time.monotonic()
        _write(results_fd, b"".join(results))


def _answer(call: Callable[[], Any]) -> Any:
    """What the call gives, or the text of its failure."""
    try:
        return call()
    except AsyncRLError as error:
        return str(error)
    except Exception as error:  # user code at a process boundary: its failure is an answer, sent back as text
        return f"{type(error).__name__}: {error}"


def _take_pipes() -> tuple[int, int]:
    """Move the pipes off descriptors 0 and 1, so that a `print` in user code cannot corrupt the stream of results."""
    calls_fd, results_fd = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return calls_fd, results_fd


def _die_with_parent(parent_pid: int) -> None:
    """A reward stuck inside C code never sees the closed pipe: without this it would outlive a killed worker."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(1)
