"""A request on its way through the engine, and the inbox between asyncio callers and the engine thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from asyncrl.engines.base import GenerateRequest
from asyncrl.errors import GenerationError
from asyncrl.types import Completion


@dataclass(slots=True, eq=False)
class Pending:
    """One `generate` call: resolved when all `n` members are finished."""

    request: GenerateRequest
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[Completion]]
    members: list[Completion | None] = field(default_factory=list)
    cancelled: bool = False

    def finish_member(self, member: int, completion: Completion) -> bool:
        """Store one completion; true (and the caller is woken) when it was the last."""
        self.members[member] = completion
        done = [one for one in self.members if one is not None]
        if len(done) == self.request.n:
            self._call(lambda: self.future.done() or self.future.set_result(done))
            return True
        return False

    def fail(self, error: GenerationError) -> None:
        self._call(lambda: self.future.done() or self.future.set_exception(error))

    def _call(self, action: object) -> None:
        # The caller's loop may be closed already (its process is going down): then nobody waits for the answer.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(action)  # pyright: ignore[reportArgumentType]


@dataclass(slots=True, eq=False)
class LoadJob:
    """Validated weights waiting for the gap between two decode steps."""

    policy_version: int
    tensors: Mapping[str, torch.Tensor]
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class Inbox:
    """Everything callers hand to the engine thread. One condition variable guards it all."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.waiting: deque[Pending] = deque()
        self.loads: deque[LoadJob] = deque()
        self.dirty = False
        """A cancellation happened since the engine last looked."""
        self.closed = False
        self.failure: Exception | None = None

    def refuse_if_stopped(self) -> None:
        """Raise the reason why nothing can be asked of the engine any more."""
        if self.failure is not None:
            raise GenerationError(f"the engine thread stopped: {self.failure!r}. Restart the worker.") from self.failure
        if self.closed:
            raise GenerationError("the engine is closed; make a new one")

    def put(self, pending: Pending) -> None:
        with self.condition:
            self.refuse_if_stopped()
            self.waiting.append(pending)
            self.condition.notify_all()

    def cancel(self, pending: Pending) -> None:
        with self.condition:
            pending.cancelled = True
            self.dirty = True
            self.condition.notify_all()

    def put_load(self, job: LoadJob) -> None:
        with self.condition:
            self.refuse_if_stopped()
            self.loads.append(job)
            self.condition.notify_all()

    def withdraw(self, job: LoadJob) -> bool:
        """Take back a load that was not started; false if it is too late."""
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

    def drain(self) -> tuple[list[Pending], list[LoadJob]]:
        """What never started, for failing it when the engine stops."""
        with self.condition:
            pending, loads = list(self.waiting), list(self.loads)
            self.waiting.clear()
            self.loads.clear()
            return pending, loads
