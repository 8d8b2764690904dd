"""The CUDA stream of a thread that moves weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class SideStream:
    """One stream for all work of its users on `device`, beside what other threads enqueue there.

    Threads share the default stream: without this, each piece of the weights would be hashed and sent only after all
    that training has enqueued until then, which is seconds of work. It is kept, as the allocator keeps memory freed on
    a stream for that stream alone.
    """

    def __init__(self, device: torch.device | str | None) -> None:
        self._device = torch.device(device or "cpu")
        self._stream: torch.cuda.Stream | None = None

    def used(self) -> AbstractContextManager[object]:
        """Context in which this thread's work on the device goes to the stream; it does nothing for the host."""
        if self._device.type != "cuda":
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._stream)


def stream_of(buffer: torch.Tensor) -> torch.cuda.Stream | None:
    """The stream to which this thread's work on a tensor goes; None in host memory."""
    return torch.cuda.current_stream(buffer.device) if buffer.device.type == "cuda" else None


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()
