"""Copies the learner's weights into a snapshot beside training instead of before it.

    publish(v) --start--> thread: gather, cast, copy        forward, backward of step v + 1 --wait--> optimizer step

Weights change only in the optimizer step, so they can be read until then; the step waits for the copy with `wait`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial

import torch

from asyncrl.background import in_background
from asyncrl.errors import WeightsError


class CopyStream:
    """Runs the copies that happen beside training on a GPU, on a CUDA stream of their own."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        """One stream for all copies: the allocator keeps memory freed on a stream for that stream alone."""

    def after_now(self, device: torch.device | None) -> Callable[[Callable[[], None]], None]:
        """Return a function that another thread calls with its work. The work runs after everything enqueued on
        `device` until now (for a GPU; other devices order themselves); what is enqueued later does not wait for it."""
        if device is None or device.type != "cuda":
            return lambda work: work()
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))

        def on_its_stream(work: Callable[[], None]) -> None:
            self._stream = self._stream or torch.cuda.Stream(device)
            with on_stream(self._stream, device, ready):
                work()

        return on_its_stream


class BackgroundCopy:
    """Runs one copy at a time, each on a thread.

    Args:
        wait_s: longest wait of `wait`. The copy itself waits only for the other ranks of the gather.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._version = 0
        self._copy: Future[None] | None = None
        self._stream = CopyStream()

    def start(self, policy_version: int, work: Callable[[], None], device: torch.device | None) -> None:
        """Run `work` on a thread; the previous copy has been waited for.

        Args:
            device: the GPU that holds the weights or the snapshot, if any. The copy runs after what is enqueued there
                until now; what is enqueued later does not wait.
        """
        self._version = policy_version
        self._copy = in_background("weights-copy", partial(self._stream.after_now(device), work))

    @property
    def running(self) -> bool:
        return self._copy is not None and not self._copy.done()

    def wait(self) -> float:
        """Wait until nothing reads the weights any more. Returns the seconds that took.

        Raises:
            WeightsError: the copy failed, or takes longer than `wait_s`.
        """
        if self._copy is None:
            return 0.0
        started = time.perf_counter()
        if wait([self._copy], self._wait_s).not_done:
            raise WeightsError(
                f"version {self._version} is still being copied out of the learner after {self._wait_s:.0f} s: "
                "another learner rank is silent in the gather. See its log, or raise weights.timeout_s."
            )
        if failure := self._copy.exception():
            raise WeightsError(
                f"version {self._version} could not be copied out of the learner: {failure}"
            ) from failure
        self._copy = None
        return time.perf_counter() - started

    def close(self, wait_s: float) -> None:
        """Wait at most `wait_s` for the copy to end; never raises."""
        if self._copy is not None:
            wait([self._copy], wait_s)


@contextmanager
def on_stream(stream: torch.cuda.Stream, device: torch.device, ready: torch.cuda.Event) -> Iterator[None]:
    """Use `stream` on this thread; it continues once `ready` is reached, and all work enqueued here is done on
    return."""
    with torch.cuda.device(device):
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
