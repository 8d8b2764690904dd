"""An environment of the user as the worker sees it: whatever it does wrong costs the group it was making, no more."""

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
from asyncrl.types import Completion, Prompt

log = logging.getLogger(__name__)

CLOSE_S = 20.0
"""For an environment to end what it started."""
PASSED_ON = (GenerationError, RewardError, EngineDiedError)
"""Of the tools an environment was given: no fault of its own, but for a request that no engine like this can serve."""


class GuardedEnvironment:
    """Runs `inner` and checks what it made.

    Args:
        name: as in `environment.name`.
        vocabulary: token ids are below it.
    """

    def __init__(self, name: str, inner: Environment, vocabulary: int) -> None:
        self._name, self._inner, self._vocabulary = name, inner, vocabulary
        self._failures = 0

    async def run(self, prompt: Prompt, size: int, tools: EpisodeTools) -> Episodes:
        """
        Raises:
            GenerationError, RewardError, EngineDiedError: a tool of the environment raised it.
            EpisodeError: anything else went wrong, a request too long for the engine included.
        """
        given = prompt.token_ids.view()
        given.flags.writeable = False  # The array is cached: written to, it would be another prompt ever after.
        # The row is that of the next try too.
        own = replace(prompt, token_ids=given, columns=deepcopy(prompt.columns))
        try:
            checked = replace(tools, generate=self._checked(tools.generate))
            episodes = await self._inner.run(own, size, checked)
            fault = find_fault(episodes, prompt, size, self._vocabulary)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Of something of its own. Passed on, it would end this task as if nobody waited for its group.
            raise self._failed("a task of it was cancelled", error) from error
        except (KeyboardInterrupt, GeneratorExit):
            raise
        # User code: whatever it raises fails one group. A panic of an extension (a tokenizer) is no Exception, and what
        # it returned may raise where it is looked at.
        except BaseException as error:
            known = next((cause for cause in causes(error) if isinstance(cause, PASSED_ON)), None)
            if known is None or isinstance(known, RequestError):
                first = next((each for each in causes(error) if not isinstance(each, BaseExceptionGroup)), error)
                why = known or f"{type(first).__name__}: {first}"
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
        """What the engine would refuse counts against the engine, and ends the worker when it goes on."""

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
        """Count a failure and say what to raise."""
        self._failures += 1
        # The 1st, 10th, 100th ...: one that always fails stalls the run and must be seen, without filling a disk.
        if str(self._failures).strip("0") == "1":
            said = "environment failure %d, its group is not made: %s: %.500s"
            log.warning(said, self._failures, self._name, why, exc_info=error)
        return EpisodeError(f"environment.name={self._name}: {why}")


async def close_environment(environment: Environment) -> None:
    """At a worker's end: its `aclose`, else its `close`, where it has one. What goes wrong there is told, and no more.
    A plain `close` gets a thread of its own: one that blocks would hold back all that still goes on in this one.

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
    except Exception:  # user code: the worker ends all the same
        log.warning("%s: its close() failed", type(inner).__name__, exc_info=True)


def causes(error: BaseException) -> Iterator[BaseException]:
    """`error`, what is in it where it is a group (of an `asyncio.TaskGroup`), and what each was raised `from`.

    Not what was merely being handled: a bug in `except RewardError:` would pass for that error and never be seen.
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
