"""Guards the worker against a user's environment: its errors cost the group that it was making, and no more."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.environments.base import Environment, Episodes, EpisodeTools, Generate
from asyncrl.environments.faults import find_fault
from asyncrl.environments.own_thread import on_own_thread
from asyncrl.errors import EngineDiedError, EpisodeError, GenerationError, RequestError, RewardError
from asyncrl.log_rate import is_power_of_ten
from asyncrl.types import Completion, Prompt
from asyncrl.user_code import described

log = logging.getLogger(__name__)

CLOSE_S = 20.0
"""Seconds for an environment to end what it started."""
PASSED_ON = (GenerationError, RewardError, EngineDiedError)
"""Errors of the tools that an environment was given: not its own fault, except a request that no such engine can
serve."""


class GuardedEnvironment:
    """Runs `inner` and checks its episodes.

    Args:
        name: value of `environment.name`.
        vocabulary: token ids are below it.
    """

    def __init__(self, name: str, inner: Environment, vocabulary: int) -> None:
        self._name, self._inner, self._vocabulary = name, inner, vocabulary
        self._failures = 0

    async def run(self, prompt: Prompt, size: int, tools: EpisodeTools) -> Episodes:
        """Run a group.

        Raises:
            GenerationError, RewardError, EngineDiedError: raised by a tool of the environment.
            EpisodeError: anything else went wrong, including a request too long for the engine.
        """
        given = prompt.token_ids.view()
        given.flags.writeable = False  # The array is cached: a write would change the prompt for good.
        # The row is used for the next try too.
        own = replace(prompt, token_ids=given, columns=deepcopy(prompt.columns))
        try:
            checked = replace(tools, generate=self._checked(tools.generate))
            running = self._inner.run(own, size, checked)
            if not inspect.isawaitable(running):
                raise EpisodeError("`run` is not async. Define it with `async def`")
            episodes = await running
            fault = find_fault(episodes, prompt, size, self._vocabulary)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # A task of its own was cancelled. Passed on, it would end this task as if nobody waited for its group.
            raise self._failed("a task of it was cancelled", error) from error
        except (KeyboardInterrupt, GeneratorExit):
            raise
        # User code: any exception fails one group. A panic of an extension (a tokenizer) is not an Exception, and
        # reading what it returned may raise too.
        except BaseException as error:
            known = next((cause for cause in causes(error) if isinstance(cause, PASSED_ON)), None)
            if known is None or isinstance(known, RequestError):
                first = next((each for each in causes(error) if not isinstance(each, BaseExceptionGroup)), error)
                why = known or (str(first) if isinstance(first, EpisodeError) else described(first))
                raise self._failed(str(why), error) from error
            if known is error:
                raise
            raise known from error
        if fault:
            raise self._failed(fault)
        return Episodes(
            trajectories=tuple(episodes.trajectories),
            texts=tuple(episodes.texts),
            failures=tuple(episodes.failures),
            own_prompts=episodes.own_prompts,
        )

    def _checked(self, generate: Generate) -> Generate:
        """Check requests first: the engine's refusal would count against the engine, and end the worker when it
        repeats."""

        async def checked(token_ids: NDArray[np.int32], n: int = 1, **sampling: Any) -> list[Completion]:
            ids = np.asarray(token_ids)
            if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu" or n < 1:
                raise ValueError(f"generate takes token ids [P] and n of 1 or more; got {ids.dtype}{ids.shape} and {n}")
            if ids.min() < 0 or ids.max() >= self._vocabulary:
                given = f"{ids.min()} to {ids.max()}"
                raise ValueError(f"token ids must be in [0, {self._vocabulary}), the model's vocabulary; got {given}")
            return await generate(ids.astype(np.int32), n, **sampling)

        return checked

    def stats(self) -> dict[str, float]:
        return {"environment_failures": float(self._failures)}

    def _failed(self, why: str, error: BaseException | None = None) -> EpisodeError:
        """Count a failure and return the error to raise."""
        self._failures += 1
        if is_power_of_ten(self._failures):
            said = "environment failure %d, so its group is not made: %s: %.500s"
            log.warning(said, self._failures, self._name, why, exc_info=error)
        return EpisodeError(f"environment.name={self._name}: {why}")


async def close_environment(environment: Environment) -> None:
    """Call the environment's `aclose`, or else its `close`, at the end of a worker, if it has one. Errors are only
    logged. A plain `close` gets its own thread: if it blocks, it would hold up everything else in this one.

    waits for: it; unblocked by: its end, or CLOSE_S.
    """
    inner = environment._inner if isinstance(environment, GuardedEnvironment) else environment
    close = getattr(inner, "aclose", None) or getattr(inner, "close", None)
    if not callable(close):
        return
    try:
        async with asyncio.timeout(CLOSE_S):
            closing = close() if inspect.iscoroutinefunction(close) else await on_own_thread(close, "close")
            if inspect.isawaitable(closing):
                await closing
    except TimeoutError:
        log.warning("%s: its close() took more than %g s and is left alone", type(inner).__name__, CLOSE_S)
    except Exception:  # user code: the worker ends anyway
        log.warning("%s: its close() failed", type(inner).__name__, exc_info=True)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, the errors in it if it is a group (of an `asyncio.TaskGroup`), and what each was raised `from`.

    Not the error that was merely being handled: a bug in `except RewardError:` would be taken for that error and stay
    hidden.
    """
    seen: set[int] = set()
    open_ = [error]
    while open_:
        one = open_.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        inside = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        open_ += [cause for cause in (*inside, one.__cause__) if cause is not None]
