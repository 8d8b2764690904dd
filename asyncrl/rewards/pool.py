"""Runs a function of the user, a reward or a filter, in child processes with a deadline per call.

A call that hangs, crashes its process, raises or returns nonsense fails alone; calls that shared its process are run
again in a fresh one. No failure ever becomes a score.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Self

from asyncrl.errors import AsyncRLError, ConfigError, RewardError, WireError
from asyncrl.rewards.process import FunctionProcess
from asyncrl.rewards.score import Outcome, RewardScore
from asyncrl.rewards.wire import IDLE, pack_frame

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""For a child to import the reward function and report."""
MODEL_START_TIMEOUT_S = 900.0
"""The same with a reward model to load, or to download."""
CLOSE_TIMEOUT_S = 5.0
MAX_BLAMELESS_DEATHS = 3
"""Deaths in a row outside any call and without an answer between them, after which waiting calls fail."""


@dataclass(slots=True)
class _Call:
    frame: bytes
    answer: asyncio.Future[Any]


class FunctionPool:
    """Starts the children, sends them calls, replaces them. `RewardPool` and `FilterPool` say what is called.

    Args:
        kind: `reward` or `filter`, see `child.KINDS`.
        error: what a failed call raises.
        function: `file.py:name` or `package.module:name`.
        workers: child processes.
        timeout_s: deadline of one call, counted from the moment it begins to run.
        model: `reward.model`; given, `function` names what is made of it (see `make_reward`).
    """

    def __init__(
        self, kind: str, error: type[AsyncRLError], function: str, *, workers: int, timeout_s: float, model: str = ""
    ) -> None:
        self._kind, self._error = kind, error
        self._function = function
        self._model = model
        self._start_timeout_s = MODEL_START_TIMEOUT_S if model else START_TIMEOUT_S
        self._workers = workers
        self._timeout_s = timeout_s
        self._processes: list[FunctionProcess] = []
        self._waiting: dict[int, _Call] = {}
        self._next_id = 1
        self._blameless_deaths = 0
        self._refusal = ""
        self._started = False
        self._closing = False
        self._ready = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts = {f"{kind}_calls": 0.0, f"{kind}_failures": 0.0, f"{kind}_restarts": 0.0}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the children and wait until the first has imported the function.

        Raises:
            ConfigError: the function cannot be loaded or called; the message says why.
        """
        for _ in range(self._workers):
            await self._start_process()
        self._spawn(self._watch())
        try:
            await asyncio.wait_for(self._ready.wait(), self._start_timeout_s)
        except TimeoutError:
            self._refusal = f"{self._function} was not ready within {self._start_timeout_s:.0f} s"
        if self._refusal:
            await self.close()
            raise ConfigError(self._refusal)
        self._started = True

    async def call(self, *arguments: Any) -> Any:
        """The function's answer, as the child wrote it. Raises `error`: it raised, timed out or killed its process."""
        if self._closing:
            raise self._error(f"the {self._kind} pool is closed")
        call_id, self._next_id = self._next_id, self._next_id + 1
        self._counts[f"{self._kind}_calls"] += 1
        try:
            frame = pack_frame([call_id, *arguments])
        except WireError as error:
            raise self.failure(str(error)) from error
        call = _Call(frame, asyncio.get_running_loop().create_future())
        self._dispatch(call_id, call)
        return await call.answer

    def stats(self) -> dict[str, float]:
        """Counters since start: calls, failures, restarts."""
        return dict(self._counts)

    async def close(self) -> None:
        """Kill the children; calls still open fail. Waits for the processes to be gone, for at most 5 s."""
        self._closing = True
        self._fail_all(f"the {self._kind} pool was closed")
        for task in self._tasks:
            task.cancel()
        for process in self._processes:
            process.kill()
        deadline = asyncio.get_running_loop().time() + CLOSE_TIMEOUT_S
        while self._processes and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.005)

    def _dispatch(self, call_id: int, call: _Call) -> None:
        ready = [process for process in self._processes if process.ready and not process.dead]
        if not ready:  # every child is being replaced: the next one to be ready takes what waits
            self._waiting[call_id] = call
            return
        least = min(ready, key=lambda process: len(process.outstanding))
        least.send(call_id, call, call.frame)

    def _on_message(self, process: FunctionProcess, message: list[Any]) -> None:
        head, *rest = message
        if head == "ready":
            process.ready = True
            self._refusal = ""
            self._ready.set()
            waiting, self._waiting = self._waiting, {}
            for call_id, call in waiting.items():
                self._dispatch(call_id, call)
            return
        if head == "refused":
            self._refusal = rest[0]
            self._ready.set()
            return
        self._blameless_deaths = 0
        call = process.outstanding.pop(head, None)
        if call is None or call.answer.done():
            return
        if isinstance(rest[0], str):
            call.answer.set_exception(self.failure(rest[0]))
        else:
            call.answer.set_result(rest[0])

    def _on_death(self, process: FunctionProcess, description: str) -> None:
        if process in self._processes:
            self._processes.remove(process)
        if self._closing:
            return
        if not self._started:
            self._refusal = self._refusal or f"importing {self._function} ended its process ({description})"
            self._ready.set()
            return
        self._counts[f"{self._kind}_restarts"] += 1
        self._spawn(self._start_process())
        self._blame(process, description)
        for call_id, innocent in process.outstanding.items():
            if not innocent.answer.done():  # its caller may have been cancelled meanwhile
                self._dispatch(call_id, innocent)
        if self._refusal:
            self._fail_all(self._refusal)
        elif self._blameless_deaths >= MAX_BLAMELESS_DEATHS:
            self._blameless_deaths = 0
            self._fail_all(f"{self._kind} processes keep dying outside any call (last: {description})")

    def _blame(self, process: FunctionProcess, description: str) -> None:
        """Fail the call that was running when the process died, if one was."""
        guilty, _ = process.current_call()
        call = process.outstanding.pop(guilty, None)
        if call is None:
            self._blameless_deaths += 1
        elif process.overdue == guilty:
            self._fail(call, f"the call ran longer than reward.timeout_s={self._timeout_s:g} s and was killed")
        else:
            self._fail(call, f"the call ended its process ({description})")

    async def _start_process(self) -> None:
        process = FunctionProcess(self._on_message, self._on_death)
        await process.start(self._kind, self._function, self._model)
        self._processes.append(process)

    async def _watch(self) -> None:
        """Enforce the deadlines.

        consumes: nothing; waits for: the clock; unblocked by: the clock, until the pool is closed.
        """
        while True:
            await asyncio.sleep(min(0.25, self._timeout_s / 4))
            for process in list(self._processes):
                self._check_deadline(process)

    def _check_deadline(self, process: FunctionProcess) -> None:
        call_id, running_s = process.current_call()
        silent_s = asyncio.get_running_loop().time() - process.heard_at
        if call_id == IDLE:
            # Stopped or wedged outside any call (or never came up): replaced, and nobody is to blame.
            limit = self._start_timeout_s if not process.ready else self._timeout_s
            if silent_s > limit and (process.outstanding or not process.ready):
                process.kill()
        elif running_s > self._timeout_s:
            process.overdue = call_id
            process.kill()

    def failure(self, why: str) -> AsyncRLError:
        """Count a failed call and say what to raise."""
        self._counts[f"{self._kind}_failures"] += 1
        count = f"{self._counts[f'{self._kind}_failures']:.0f}"
        # The 1st, 10th, 100th ...: one that always fails stalls the run and must be seen, without filling a disk.
        if not self._closing and count.strip("0") == "1":
            log.warning("%s failure %s, its group is not whole: %s: %.500s", self._kind, count, self._function, why)
        return self._error(f"{self._function}: {why}")

    def _fail(self, call: _Call, why: str) -> None:
        if not call.answer.done():
            call.answer.set_exception(self.failure(why))

    def _fail_all(self, why: str) -> None:
        for process in self._processes:
            for call in process.outstanding.values():
                self._fail(call, why)
            process.outstanding.clear()
        for call in self._waiting.values():
            self._fail(call, why)
        self._waiting.clear()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps only weak references to tasks
        task.add_done_callback(self._tasks.discard)


class RewardPool(FunctionPool):
    """`async with RewardPool(...) as pool: scores = await pool.score(completions, row)`; see `FunctionPool`."""

    def __init__(self, function: str, *, workers: int, timeout_s: float, model: str = "") -> None:
        super().__init__("reward", RewardError, function, workers=workers, timeout_s=timeout_s, model=model)

    async def score(self, completions: list[str], row: dict[str, Any]) -> list[Outcome]:
        """One score per completion of one group, or why this one has none.

        Raises:
            RewardError: none has one: the call timed out or killed its process, or failed for each of them.
        """
        answers = await self.call(completions, row)
        failed = [answer for answer in answers if isinstance(answer, str)]
        error = self.failure(failed[0]) if failed else None
        if error is not None and len(failed) == len(answers):
            raise error
        return [
            RewardError(f"{self._function}: {answer}")
            if isinstance(answer, str)
            else RewardScore(value=answer[0], parts=answer[1])
            for answer in answers
        ]
