"""Runs a user's function, a reward or a filter, in child processes with a deadline per call.

A call that hangs, crashes its process, raises or returns nonsense fails alone; calls that shared its process are run
again in a fresh one. With a reward that is called per completion, only the completion fails. No failure ever becomes a
score.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from asyncrl.checks.rewards import AT_ONCE, RewardTerm, full_name
from asyncrl.errors import AsyncRLError, ConfigError, RewardError, WireError
from asyncrl.log_rate import is_power_of_ten
from asyncrl.rewards.process import FunctionProcess
from asyncrl.rewards.score import Outcome, RewardScore
from asyncrl.rewards.silence import Silence
from asyncrl.rewards.wire import IDLE, TOGETHER, WHOLE, pack_frame, told
from asyncrl.types import Completion

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Seconds for a child to import the reward function and report."""
MODEL_START_TIMEOUT_S = 900.0
"""The same with a reward model to load or download."""
CLOSE_TIMEOUT_S = 5.0
TOGETHER_S = 1.0
"""Seconds past the deadline after which a process is killed whose calls run together; they end at their deadlines by
themselves."""
MAX_GUILTY = 3
"""Limit on the completions of one group that may each cost a process or a deadline; then the rest of the group fails
too."""
MAX_BLAMELESS_DEATHS = 3
"""Limit on deaths in a row outside any call and without an answer between them; then waiting calls fail."""


@dataclass(slots=True)
class _Call:
    frame: bytes
    answer: asyncio.Future[Any]


class CallEnded(Exception):
    """A call ended without an answer: why, the reason from `types.REWARD_FAILURES`, and the completion if it was a
    single one."""

    def __init__(self, why: str, reason: str = "raised", place: int = WHOLE) -> None:
        super().__init__(why)
        self.why, self.reason, self.place = why, reason, place


class FunctionPool:
    """Starts the children, sends them calls, and replaces them. `RewardPool` and `FilterPool` define the calls.

    Args:
        kind: `reward` or `filter`, see `child.KINDS`.
        error: exception that a failed call raises.
        functions: names in failures, of the functions of which the children's one is composed.
        what: description of what the children create, as JSON.
        workers: number of child processes.
        timeout_s: deadline of one call, counted from the moment it starts to run.
        at_once: number of async calls that one child runs concurrently.
        start_timeout_s: seconds for a child to import or load the function.
    """

    def __init__(
        self,
        kind: str,
        error: type[AsyncRLError],
        functions: Sequence[str],
        what: str,
        *,
        workers: int,
        timeout_s: float,
        at_once: int = AT_ONCE,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._kind, self._error = kind, error
        self._functions, self._what = functions, what
        self._function = " + ".join(functions)
        self._at_once = at_once
        self._looks_at_tokens = False
        self._start_timeout_s = start_timeout_s
        self._workers = workers
        self._timeout_s = timeout_s
        self._silence = Silence(f"the {kind} {self._function}")
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
        """Return the function's answer, as the child wrote it. Raises `error`: it raised, timed out or killed its
        process."""
        try:
            return await self._ask(*arguments)
        except CallEnded as ended:
            raise self.failure(ended.why) from None

    async def _ask(self, *arguments: Any) -> Any:
        """As `call`, but raises CallEnded."""
        if self._closing:
            raise CallEnded(f"the {self._kind} pool is closed", "lost")
        call_id, self._next_id = self._next_id, self._next_id + 1
        self._counts[f"{self._kind}_calls"] += 1
        try:
            frame = pack_frame([call_id, *arguments])
        except WireError as error:
            raise CallEnded(str(error), "lost") from error
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
        if not ready:  # every child is being replaced: the next one to be ready takes the waiting calls
            self._waiting[call_id] = call
            return
        least = min(ready, key=lambda process: len(process.outstanding))
        least.send(call_id, call, call.frame)

    def _on_message(self, process: FunctionProcess, message: list[Any]) -> None:
        head, *rest = message
        if head == "ready":
            process.ready = True
            self._looks_at_tokens = rest[0]
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
        self._silence.heard()
        call = process.outstanding.pop(head, None)
        if call is None or call.answer.done():
            return
        if isinstance(rest[0], str):
            call.answer.set_exception(CallEnded(rest[0]))
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
        guilty, _, place, term = process.progress()
        named = f"{self._functions[term]}: " if len(self._functions) > 1 else ""
        call = process.outstanding.pop(guilty, None)
        if call is None:
            self._blameless_deaths += 1
        elif process.overdue == guilty:
            why = f"{named}the call ran longer than reward.timeout_s={self._timeout_s:g} s and was killed"
            self._fail(call, CallEnded(why, "timed_out", place))
        else:
            self._fail(call, CallEnded(f"{named}the call ended its process ({description})", "exited", place))

    async def _start_process(self) -> None:
        process = FunctionProcess(self._on_message, self._on_death)
        await process.start(self._kind, self._what, self._timeout_s, self._at_once)
        self._processes.append(process)

    async def _watch(self) -> None:
        """Enforce the deadlines, and warn if no call is answered.

        consumes: nothing; waits for: the clock; unblocked by: the clock, until the pool is closed.
        """
        while True:
            await asyncio.sleep(min(0.25, self._timeout_s / 4))
            for process in list(self._processes):
                self._check_deadline(process)
            calls = len(self._waiting) + sum(len(process.outstanding) for process in self._processes)
            if said := self._silence.look(calls):
                log.warning("%s (reward.timeout_s=%g)", said, self._timeout_s)

    def _check_deadline(self, process: FunctionProcess) -> None:
        call_id, began, place, _ = process.progress()
        now = time.monotonic()
        if call_id == IDLE:
            silent_s = now - max(process.heard_at, began)
            # Stopped or stuck outside any call, or never started: replaced, and no call is blamed.
            limit = self._start_timeout_s if not process.ready else self._timeout_s + TOGETHER_S
            if silent_s > limit and (process.outstanding or not process.ready):
                process.kill()
        elif now - began > self._timeout_s + (TOGETHER_S if place == TOGETHER else 0.0):
            process.overdue = call_id
            process.kill()

    def failure(self, why: str) -> AsyncRLError:
        """Count a failed call and return the error to raise."""
        said = f"{self._function}: {why}"
        self.count_failure(said)
        return self._error(said)

    def count_failure(self, said: str) -> None:
        self._counts[f"{self._kind}_failures"] += 1
        count = int(self._counts[f"{self._kind}_failures"])
        if not self._closing and is_power_of_ten(count):
            log.warning("%s failure %d, so its group is incomplete: %.600s", self._kind, count, said)

    def _fail(self, call: _Call, ended: CallEnded) -> None:
        if not call.answer.done():
            call.answer.set_exception(ended)

    def _fail_all(self, why: str) -> None:
        for process in self._processes:
            for call in process.outstanding.values():
                self._fail(call, CallEnded(why, "lost"))
            process.outstanding.clear()
        for call in self._waiting.values():
            self._fail(call, CallEnded(why, "lost"))
        self._waiting.clear()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps only weak references to tasks
        task.add_done_callback(self._tasks.discard)


class RewardPool(FunctionPool):
    """`async with RewardPool(...) as pool: scores = await pool.score(completions, row)`; see `FunctionPool`.

    Args:
        terms: from `reward_terms` of the settings, or one function: `file.py:name`, `package.module:name`, or the name
            of a built-in one.
    """

    def __init__(
        self, terms: str | Sequence[RewardTerm], *, workers: int, timeout_s: float, at_once: int = AT_ONCE
    ) -> None:
        terms = [RewardTerm(function=full_name(terms))] if isinstance(terms, str) else terms
        super().__init__(
            "reward",
            RewardError,
            [term.name or term.function for term in terms],
            json.dumps([asdict(term) for term in terms]),
            workers=workers,
            timeout_s=timeout_s,
            at_once=at_once,
            start_timeout_s=MODEL_START_TIMEOUT_S if any(term.model for term in terms) else START_TIMEOUT_S,
        )

    async def score(
        self,
        completions: list[str],
        row: dict[str, Any],
        *,
        sampled: Sequence[Completion] | None = None,
        turns: Sequence[list[str]] | None = None,
    ) -> list[Outcome]:
        """Return one score per completion of a group, or why it has none.

        Args:
            sampled: the same completions from the engine, for functions that use token ids.
            turns: all replies of the policy in each episode, for functions that use those.

        Raises:
            RewardError: no completion has a score.
        """
        outcomes: dict[int, Outcome] = {}
        left, guilty = list(range(len(completions))), 0
        if not self._looks_at_tokens:
            sampled = turns = None
        while left:
            given = [
                [completions[place] for place in left],
                row,
                *told([sampled[place] for place in left] if sampled else None),
                [list(turns[place]) for place in left] if turns else None,
            ]
            try:
                answers = await self._ask(*given)
            except CallEnded as ended:
                guilty += 1
                error = RewardError(f"{self._function}: {ended.why}", ended.reason)
                if ended.place < 0:
                    outcomes |= dict.fromkeys(left, error)
                    break
                outcomes[left.pop(ended.place)] = error
                if guilty == MAX_GUILTY:
                    why = (
                        f"{self._function}: not scored, because {guilty} other completions of its group failed. The "
                        f"last failure: {ended.why}"
                    )
                    outcomes |= {place: RewardError(why, "lost") for place in left}
                    break
            else:
                outcomes |= {place: self._outcome(answer) for place, answer in zip(left, answers, strict=True)}
                break
        failed = [outcome for outcome in outcomes.values() if isinstance(outcome, RewardError)]
        if failed:
            self.count_failure(str(failed[0]))
        if failed and len(failed) == len(completions):
            raise failed[0]
        return [outcomes[place] for place in range(len(completions))]

    def _outcome(self, answer: list[Any]) -> Outcome:
        if isinstance(answer[0], str):
            named = self._function in answer[1]  # an invalid number is reported with the name
            return RewardError(answer[1] if named else f"{self._function}: {answer[1]}", answer[0])
        return RewardScore(value=answer[0], parts=answer[1], turns=tuple(answer[2]))
