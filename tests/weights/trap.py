"""What the chaos runs set in a process: it kills or stops itself in one phase of an update."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.weights.broadcast.group import WeightGroup
from asyncrl.weights.broadcast.protocol import post

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Injection:
    action: str
    """A key of `SIGNALS`."""
    who: str
    """`worker` (the process that owns the engine), `core` (vLLM's own process), `learner` (its rank 0) or `sender`,
    another rank of it."""
    phase: str
    """A key of the protocol with its side (`before accept`), `bucket N`, `fingerprint`, `mid load`..."""
    delta: bool = False
    shared: bool = False
    """Two learner ranks send, each its share."""
    ipc: bool = False
    """Workers copy out of the learner's memory."""
    in_place: bool = False
    """The weights are sent without a copy, and written to in the same memory (`weights.copies=none`)."""

    @property
    def name(self) -> str:
        kind = f"{' (delta)' if self.delta else ''}{' (two senders)' if self.shared else ''}"
        kind += f"{' (ipc)' if self.ipc else ''}{' (in place)' if self.in_place else ''}"
        return f"{self.action}@{self.who}: {self.phase}{kind}"


class Trap:
    """Fires once in this process, in the phase it is armed for; it lies wherever a phase calls `at`."""

    def __init__(self) -> None:
        self._action, self._phase = "", ""
        self._tell: Callable[[], object] = lambda: None
        self.bucket = 0
        """Number, within the update, of the piece that is broadcast next."""

    def arm(self, action: str, phase: str, tell: Callable[[], object]) -> None:
        """`tell` is called when it fires, while the process still can."""
        self._action, self._phase, self._tell = action, phase, tell

    def at(self, phase: str) -> None:
        if phase == self._phase:
            self._phase = ""
            self._tell()
            os.kill(os.getpid(), SIGNALS[self._action])

    def post(self, store: Any, key: str, message: Any) -> None:
        """In the place of `protocol.post`."""
        kind = next((part for part in key.split("/") if part.isalpha() and len(part) > 1), key)
        self.at(f"before {kind}")
        if kind == "event":
            self.bucket = 0
        post(store, key, message)
        self.at(f"after {kind}")

    def group(self) -> type[WeightGroup]:
        """In the place of `WeightGroup`."""
        trap = self

        class TrappedGroup(WeightGroup):
            def broadcast(self, buffer: torch.Tensor) -> Any:
                trap.at(f"bucket {trap.bucket}")
                trap.bucket += 1
                return super().broadcast(buffer)

        return TrappedGroup
