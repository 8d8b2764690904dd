"""Requests in the engine, and the inbox between asyncio callers and the engine thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engines.base import GenerateRequest
from asyncrl.errors import GenerationError
from asyncrl.types import Completion

Item = TypeVar("Item")

_PREFILL_PROMPTS = 32
_PREFILL_TOKENS = 16384


@dataclass(slots=True, eq=False)
class Pending:
    """One `generate` call: resolved once all `n` members are finished."""

    request: GenerateRequest
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[Completion]]
    members: dict[int, Completion] = field(default_factory=dict)
    cancelled: bool = False

    def finish_member(self, member: int, completion: Completion) -> bool:
        """Store one completion; returns whether it was the last, so that `hand_out` is due."""
        self.members[member] = completion
        return len(self.members) == self.request.n

    def fail(self, error: GenerationError) -> None:
        # The caller's loop may be closed already, since its process is ending: then nobody waits for the answer.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(lambda: self.future.done() or self.future.set_exception(error))


def hand_out(finished: Sequence[Pending]) -> None:
    """Return completions to their callers with one wake-up per loop: short sequences finish many at a time, and each
    wake-up is a system call here and an iteration of the loop there."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Pending]] = {}
    for pending in finished:
        by_loop.setdefault(pending.loop, []).append(pending)
    for loop, its in by_loop.items():
        with contextlib.suppress(RuntimeError):  # closed: nobody waits
            loop.call_soon_threadsafe(_answer, its)


def _answer(finished: Sequence[Pending]) -> None:
    for pending in finished:
        if not pending.future.done():
            pending.future.set_result([pending.members[member] for member in range(pending.request.n)])


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """Work that the engine thread does between two decode steps, for a waiting caller."""

    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class LoadJob(Job):
    """Validated weights."""

    policy_version: int
    tensors: Mapping[str, torch.Tensor]


@dataclass(slots=True, eq=False, kw_only=True)
class ScoreJob(Job):
    """Sequences to score, and once done their log-probs."""

    sequences: Sequence[NDArray[np.int32]]
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)


class Inbox:
    """Everything that callers pass to the engine thread, guarded by one condition variable."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.waiting: deque[Pending] = deque()
        self.loads: deque[LoadJob] = deque()
        self.scores: deque[ScoreJob] = deque()
        self.dirty = False
        """Whether a request was cancelled since the engine last checked."""
        self.closed = False
        self.failure: Exception | None = None

    def put(self, queue: deque[Item], item: Item) -> None:
        """Put it into one of the queues. Raises GenerationError: the engine accepts nothing any more."""
        with self.condition:
            if self.failure is not None:
                stopped = f"the engine thread stopped: {self.failure!r}. Restart the worker."
                raise GenerationError(stopped) from self.failure
            if self.closed:
                raise GenerationError("the engine is closed; make a new one")
            queue.append(item)
            self.condition.notify_all()

    def cancel(self, pending: Pending) -> None:
        with self.condition:
            pending.cancelled = True
            self.dirty = True
            self.condition.notify_all()

    def withdraw(self, job: LoadJob) -> bool:
        """Take back a load that has not started; returns false if it is too late."""
        with self.condition:
            if job in self.loads:
                self.loads.remove(job)
                return True
            return False

    def close(self, failure: Exception | None = None) -> None:
        with self.condition:
            self.closed = True
            self.failure = self.failure or failure
            self.condition.notify_all()

    def drain(self) -> tuple[list[Pending], list[Job]]:
        """Take everything that never started, to fail it when the engine stops."""
        with self.condition:
            pending, jobs = list(self.waiting), [*self.loads, *self.scores]
            for queue in (self.waiting, self.loads, self.scores):
                queue.clear()
            return pending, jobs


def chunks(lengths: Sequence[int]) -> list[list[int]]:
    """Divide sequence lengths, in order, into chunks limited in number and in padded tokens, so that a prefill's
    activations stay bounded."""
    parts: list[list[int]] = []
    for length in lengths:
        longest = max(*parts[-1], length) if parts else 0
        full = parts and (len(parts[-1]) >= _PREFILL_PROMPTS or longest * (len(parts[-1]) + 1) > _PREFILL_TOKENS)
        if not parts or full:
            parts.append([])
        parts[-1].append(length)
    return parts
