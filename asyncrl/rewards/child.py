"""`python -m asyncrl.rewards.child KIND WHAT TIMEOUT_S AT_ONCE PROGRESS_FD PARENT_PID`: runs a user's function.

consumes:     calls from the pipe on standard input
waits for:    the next call, without a deadline: the pool owns the deadlines and kills this process past one
unblocked by: the pool writing, or closing the pipe (end of file: exit)

User code may print, crash, hang or exit here; none of it affects the rollout worker.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import mmap
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from asyncrl.checks.rewards import RewardTerm
from asyncrl.errors import AsyncRLError, RewardError
from asyncrl.plain_text import make_streams_plain
from asyncrl.rewards.call import Call, CallClock
from asyncrl.rewards.filters import FinishedGroup, make_filter
from asyncrl.rewards.loader import make_reward
from asyncrl.rewards.printed import LimitedStream
from asyncrl.rewards.score import Outcome, RewardScore
from asyncrl.rewards.wire import PROGRESS_BYTES, FrameBuffer, begin_call, begin_place, end_call, pack_frame
from asyncrl.storage.log_stream import take_pipes
from asyncrl.utils.process_tree import die_with_parent

READ_BYTES = 1 << 20
FLUSH_S = 0.005
"""Longest time in seconds that results wait for the end of their batch."""
MOST_LEFT = 16
"""Limit on the calls that continue past their deadline and cannot be cancelled; the process is then replaced."""


def reward_answers(what: str, clock_of: Callable[[int], CallClock]) -> tuple[Callable[..., Any], bool]:
    """Return `(completions, row, ids, finish reasons, turns) -> [[value, parts, turns] or [reason, why there is none],
    ...]`, and whether it uses ids, reasons and turns."""
    terms = [RewardTerm(**term | {"data_source": tuple(term["data_source"])}) for term in json.loads(what)]
    reward = make_reward(terms, clock_of)

    def answer(completions: list[str], row: dict[str, Any], ids: Any, finish_reasons: Any, turns: Any) -> Any:
        try:
            call = Call(completions=completions, row=row, packed_ids=ids, finish_reasons=finish_reasons, turns=turns)
            found = reward(call)
        except RewardError as error:
            return packed([error] * len(completions))
        return later(found, len(completions)) if inspect.isawaitable(found) else packed(found)

    async def later(awaitable: Awaitable[list[Outcome]], size: int) -> list[Any]:
        try:
            return packed(await awaitable)
        except RewardError as error:
            return packed([error] * size)

    def packed(outcomes: list[Outcome]) -> list[Any]:
        return [[o.value, o.parts, o.turns] if isinstance(o, RewardScore) else [o.reason, str(o)] for o in outcomes]

    return answer, reward.looks_at_tokens


def filter_answers(what: str, _clock_of: Callable[[int], CallClock]) -> tuple[Callable[..., Any], bool]:
    """Return `(fields of a FinishedGroup) -> [keep, why not]`, and False."""
    judge = make_filter(json.loads(what))

    def answer(fields: dict[str, Any]) -> list[Any]:
        verdict = judge(FinishedGroup(**fields))
        return [verdict.keep, verdict.why]

    return answer, False


KINDS = {"reward": reward_answers, "filter": filter_answers}


def main(kind: str, what: str, timeout_s: float, at_once: int, progress_fd: int, parent_pid: int) -> int:
    calls_fd, results_fd = take_pipes()
    make_streams_plain()
    sys.stdout, sys.stderr = LimitedStream(sys.stdout), LimitedStream(sys.stderr)
    # A reward stuck in C code never notices the closed pipe: without this it would outlive a killed worker.
    die_with_parent(parent_pid)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    server = _Server(calls_fd, results_fd, mmap.mmap(progress_fd, PROGRESS_BYTES))
    try:
        answers, looks_at_tokens = KINDS[kind](what, server.clocks(timeout_s, at_once))
    except AsyncRLError as error:
        _write(results_fd, pack_frame(["refused", str(error)]))
        return 2
    _write(results_fd, pack_frame(["ready", looks_at_tokens]))
    server.serve(answers)
    return 0


class _Server:
    """Runs calls one after another; what they await continues beside the next ones.

    The loop runs only while something is awaited and no call has arrived, since a function may use `asyncio.run`
    itself.
    """

    def __init__(self, calls_fd: int, results_fd: int, progress: mmap.mmap) -> None:
        self._calls_fd, self._results_fd, self._progress = calls_fd, results_fd, progress
        self._buffer = FrameBuffer()
        self._loop = asyncio.new_event_loop()
        self._open: dict[int, asyncio.Task[None]] = {}
        """Awaited calls, by call id."""
        self._call: contextvars.ContextVar[int] = contextvars.ContextVar("call")
        """Id of the running call. Its tasks keep this value: they may start after other calls have arrived."""
        self._left: set[asyncio.Future[Any]] = set()
        """As `CallClock.left`."""
        self._own_loop: asyncio.AbstractEventLoop | None = None
        """What `asyncio.get_event_loop()` returns in a function that is not async; it may run, set or close it."""

    def clocks(self, timeout_s: float, at_once: int) -> Callable[[int], CallClock]:
        """Return the clock of each function of a reward; those awaited share `at_once` slots."""
        slots = asyncio.Semaphore(at_once)

        def clock(term: int) -> CallClock:
            begin = functools.partial(begin_place, self._progress, term)
            return CallClock(timeout_s, begin, functools.partial(self._watch, begin), slots, self._left)

        return clock

    def serve(self, answers: Callable[..., Any]) -> None:
        self._loop.add_reader(self._calls_fd, self._loop.stop)
        while True:
            if self._open:
                self._loop.run_forever()  # until a call arrives, or the last one is answered
            data = os.read(self._calls_fd, READ_BYTES)
            if not data:
                return
            self._take(answers, data)

    def _take(self, answers: Callable[..., Any], data: bytes) -> None:
        results: list[bytes] = []
        flushed = time.monotonic()
        for call_id, *arguments in self._buffer.feed(data):
            self._call.set(call_id)
            self._offer_loop()
            begin_call(self._progress, call_id)
            answer = _answer(functools.partial(answers, *arguments))
            end_call(self._progress)
            if inspect.isawaitable(answer):
                self._open[call_id] = self._loop.create_task(self._finish(call_id, answer))
                continue
            results.append(pack_frame([call_id, answer]))
            if time.monotonic() - flushed > FLUSH_S:
                _write(self._results_fd, b"".join(results))
                results, flushed = [], time.monotonic()
        _write(self._results_fd, b"".join(results))

    def _offer_loop(self) -> None:
        """Set a loop for `asyncio.get_event_loop()`. Ours would be stopped by the next call, and after an `asyncio.run`
        there is none."""
        if self._own_loop is None or self._own_loop.is_closed():
            self._own_loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._own_loop)

    async def _finish(self, call_id: int, answer: Awaitable[Any]) -> None:
        try:
            said = await answer
        except Exception as error:  # user code at a process boundary: its failure is an answer, sent back as text
            said = failure_text(error)
        del self._open[call_id]
        _write(self._results_fd, pack_frame([call_id, said]))
        if len(self._left) >= MOST_LEFT:
            os._exit(1)  # between calls: the pool blames none, and sends the open ones to the next process
        if not self._open:
            self._loop.stop()

    def _watch(self, begin: Callable[[int], None], place: int, awaitable: Awaitable[Any]) -> Awaitable[Any]:
        return _Watched(awaitable, self._progress, self._call.get(), functools.partial(begin, place))


class _Watched:
    """Reports to the pool at each step of a coroutine whose it is, so that one that blocks or crashes is blamed
    alone."""

    def __init__(
        self, awaitable: Awaitable[Any], progress: mmap.mmap, call_id: int, begin_place: Callable[[], None]
    ) -> None:
        self._steps = awaitable.__await__()
        self._progress, self._call_id, self._begin_place = progress, call_id, begin_place

    def __await__(self) -> Generator[Any, Any, Any]:
        error: BaseException | None = None
        while True:
            begin_call(self._progress, self._call_id)
            self._begin_place()
            try:
                step = self._steps.send(None) if error is None else self._steps.throw(error)
            except StopIteration as end:
                return end.value
            except (SystemExit, KeyboardInterrupt) as ends:
                # Exit while the record names this call: outside all calls the exit would fail those that wait.
                sys.stdout.flush()
                os._exit(ends.code if isinstance(ends, SystemExit) and isinstance(ends.code, int) else 1)
            finally:
                end_call(self._progress)
            try:
                yield step
                error = None
            except BaseException as raised:  # a cancellation, or the deadline, for the coroutine to handle
                error = raised


def _answer(call: Callable[[], Any]) -> Any:
    """Return the call's result, or the text of its failure."""
    try:
        return call()
    except Exception as error:  # user code at a process boundary: its failure is an answer, sent back as text
        return failure_text(error)


def failure_text(error: Exception) -> str:
    return str(error) if isinstance(error, AsyncRLError) else f"{type(error).__name__}: {error}"


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


if __name__ == "__main__":
    try:
        kind, what, timeout_s, *numbers = sys.argv[1:]
        sys.exit(main(kind, what, float(timeout_s), *map(int, numbers)))
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(1)
