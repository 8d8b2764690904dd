"""Writes a checkpoint during training: from a copy in host memory, on a thread, with a process group of its own.

begin --> thread: copy ... | write, hash, sync, seal, commit ... saved
          the optimizer step waits for the copy                  the next save, and the end, wait for this
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.background import in_background
from asyncrl.errors import AsyncRLError, CheckpointError
from asyncrl.weights.publishing.copying import CopyStream
from asyncrl.weights.publishing.sharding import local

HOST = torch.device("cpu")
"""Device with which the ranks of a save communicate."""


def own_group(within_s: float) -> dist.ProcessGroup | None:
    """The process group of saves: gloo, whatever training uses, and not ordered with training's collectives. None for a
    single rank. Collective.

    Args:
        within_s: limit on the seconds that a rank may take longer than the others.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group = dist.new_group(timeout=timedelta(seconds=within_s), backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


class HostCopy:
    """Copies (sharded) tensors to host memory. The memory is kept for the next copy, because allocating fresh pages
    takes longer than filling them."""

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a nested dictionary of tensors; the copy is valid until the next `take`."""
        self._held = _copied(tensors, self._held)
        return self._held


def _copied(value: Any, held: Any) -> Any:
    if isinstance(value, Mapping):
        before = held if isinstance(held, Mapping) else {}
        return {name: _copied(part, before.get(name)) for name, part in value.items()}
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if isinstance(held, Tensor) and _alike(held, value):
        local(held).copy_(local(value))
        return held
    return value.detach().to("cpu", copy=True)


def _alike(held: Tensor, value: Tensor) -> bool:
    if isinstance(held, DTensor) and isinstance(value, DTensor):
        if (held.placements, held.device_mesh) != (value.placements, value.device_mesh):
            return False
    elif isinstance(held, DTensor) or isinstance(value, DTensor):
        return False
    return (held.shape, held.dtype) == (value.shape, value.dtype)


class BackgroundSave:
    """Runs one save at a time.

    Waits for: the disk and the other ranks, on its thread; callers of `wait_copied` and `finish` wait for the thread.
    Unblocked by: the end of the copy, or of the save, or the deadline.

    Args:
        within_s: limit on the seconds that a save may take.
    """

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._save: Future[None] | None = None
        self._name = ""
        self._started = 0.0
        self._copied = threading.Event()
        self._stream = CopyStream()
        self._took = dict.fromkeys(("checkpoint/save_s", "checkpoint/copy_wait_s", "checkpoint/wait_s"), 0.0)

    def start(self, name: str, copied: Callable[[], None], write: Callable[[], None], device: torch.device) -> None:
        """Run `copied`, then `write`, on a thread. The previous save must be finished.

        Args:
            name: what is saved, for messages.
            copied: reads the tensors that steps change.
            device: device of these. `copied` runs after the work that is queued on a GPU now.
        """
        self._name, self._started = name, time.monotonic()
        self._copied.clear()
        work = partial(self._run, partial(self._stream.after_now(device), copied), write, device)
        self._save = in_background("checkpoint", work)  # a disk that hangs keeps no learner from ending

    def _run(self, copied: Callable[[], None], write: Callable[[], None], device: torch.device) -> None:
        if device.type == "cuda":
            # A thread begins on GPU 0. There torch's writer would wait, and not for the copies from this rank's GPU.
            torch.cuda.set_device(device)
        try:
            copied()
        finally:
            self._copied.set()
        write()
        self._took["checkpoint/save_s"] = time.monotonic() - self._started

    def wait_copied(self) -> None:
        """Wait until weights and moments are no longer read. Raises CheckpointError after the deadline."""
        if self._save is None or self._copied.is_set():
            return
        began = time.monotonic()
        if not self._copied.wait(self._within_s):
            raise CheckpointError(
                f"{self._name} is still being copied to host memory after {self._within_s:g} s (learner.save_timeout_s)"
            )
        self._took["checkpoint/copy_wait_s"] += time.monotonic() - began

    @property
    def busy(self) -> bool:
        return self._save is not None and not self._save.done()

    def timings(self) -> dict[str, float]:
        """Seconds since the last call: of the last save, and of waits of steps for its copy and for its end."""
        took, self._took = self._took, dict.fromkeys(self._took, 0.0)
        return {name: seconds for name, seconds in took.items() if seconds}

    def finish(self, within_s: float | None = None) -> None:
        """Wait until the running save is complete.

        Raises:
            CheckpointError: it could not be written, or takes too long.
            DiskFullError, RunFolderError: raised by `write`.
        """
        if self._save is None:
            return
        began = time.monotonic()
        left_s = max(0.0, self._started + self._within_s - began if within_s is None else within_s)
        late = wait([self._save], left_s).not_done
        self._took["checkpoint/wait_s"] += time.monotonic() - began
        if late:
            raise CheckpointError(
                f"{self._name} is still being written after {time.monotonic() - self._started:.0f} s: the disk, or "
                "another learner rank, is slow or hangs. Earlier checkpoints are intact; raise learner.save_timeout_s"
            )
        failure, self._save = self._save.exception(), None
        # A collective failed because another rank is gone.
        if isinstance(failure, (RuntimeError, EOFError)) and not isinstance(failure, AsyncRLError):
            raise CheckpointError(
                f"{self._name} could not be written, see the other learner ranks: {failure}"
            ) from failure
        if failure is not None:
            raise failure
