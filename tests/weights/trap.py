"""A trap that the chaos runs set in a process: the process kills or stops itself in one phase of an update."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.weights.broadcast.group import WeightGroup
from asyncrl.weights.broadcast.protocol import post
from asyncrl.weights.files import fetching, tensor_file
from asyncrl.weights.files.items import Item
from asyncrl.weights.manifest import Bucket

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Injection:
    action: str
    """A key of `SIGNALS`."""
    who: str
    """`worker` (the process that owns the engine), `core` (vLLM's own process) or `learner`."""
    phase: str
    """`before` or `after` a key of the protocol (`before accept`), `bucket N`, `fingerprint`, `mid load`...; with
    `files` also `block N` (a worker has read N blocks of a file) and `mid file` (the learner has written the first
    bucket of a file)."""
    delta: bool = False
    ipc: bool = False
    """Workers copy out of the learner's memory."""
    files: bool = False
    """Workers read versions at a URL (`weights=files`)."""

    @property
    def name(self) -> str:
        kind = f"{' (delta)' if self.delta else ''}"
        kind += f"{' (ipc)' if self.ipc else ''}{' (files)' if self.files else ''}"
        return f"{self.action}@{self.who}: {self.phase}{kind}"


class Trap:
    """Fires once in this process, in the phase it is armed for. Each phase calls `at`."""

    def __init__(self) -> None:
        self._action, self._phase = "", ""
        self._tell: Callable[[], object] = lambda: None
        self.bucket = 0
        """Number of the next broadcast bucket within the update."""

    def arm(self, action: str, phase: str, tell: Callable[[], object]) -> None:
        """Arm the trap for `phase`. When it fires, it calls `tell` and then sends the signal of `action`."""
        self._action, self._phase, self._tell = action, phase, tell

    def at(self, phase: str) -> None:
        if phase == self._phase:
            self._phase = ""
            self._tell()
            os.kill(os.getpid(), SIGNALS[self._action])

    def post(self, store: Any, key: str, message: Any) -> None:
        """Replaces `protocol.post`."""
        kind = next((part for part in key.split("/") if part.isalpha() and len(part) > 1), key)
        self.at(f"before {kind}")
        if kind == "event":
            self.bucket = 0
        post(store, key, message)
        self.at(f"after {kind}")

    def group(self) -> type[WeightGroup]:
        """Return a class that replaces `WeightGroup`."""
        trap = self

        class TrappedGroup(WeightGroup):
            def broadcast(self, buffer: torch.Tensor) -> Any:
                trap.at(f"bucket {trap.bucket}")
                trap.bucket += 1
                return super().broadcast(buffer)

        return TrappedGroup

    def blocks(self) -> None:
        """Set the trap in the reading of files at a URL, and make its blocks small."""
        trap, blocks = self, fetching.FsspecSource.blocks
        fetching._BLOCK = 1000

        def counted(source: fetching.FsspecSource, item: Item, start: int) -> Iterator[tuple[int, bytes]]:
            for number, block in enumerate(blocks(source, item, start)):
                trap.at(f"block {number}")
                yield block

        fetching.FsspecSource.blocks = counted  # pyright: ignore[reportAttributeAccessIssue]

    def files(self) -> None:
        """Set the trap in the writing of files."""
        trap, write = self, tensor_file.TensorFileWriter.write_bucket

        def written(writer: tensor_file.TensorFileWriter, bucket: Bucket, buffer: torch.Tensor) -> None:
            write(writer, bucket, buffer)
            trap.at("mid file")

        tensor_file.TensorFileWriter.write_bucket = written  # pyright: ignore[reportAttributeAccessIssue]
