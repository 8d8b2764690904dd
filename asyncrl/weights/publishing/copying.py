"""A CUDA stream for copies that run beside training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


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


@contextmanager
def on_stream(stream: torch.cuda.Stream, device: torch.device, ready: torch.cuda.Event) -> Iterator[None]:
    """Use `stream` on this thread; it continues once `ready` is reached, and all work enqueued here is done on
    return."""
    with torch.cuda.device(device):
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
