"""How a learner is asked to save a checkpoint and end: by a file in the run folder, or by Ctrl-C to its torchrun."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from asyncrl.config import LOG_DIR
from asyncrl.telemetry.folder.run_folder import STOP_FILE

Asked = Callable[[], bool]


def never() -> bool:
    return False


class StopRequest:
    """Call it: has this rank been asked?

    The file reaches a rank in whatever state it is, also one that torchrun has just started again; SIGINT is what
    torchrun passes on of a Ctrl-C in its terminal. SIGTERM is left alone: with it torchrun ends the ranks that outlived
    another one, and they are to end at once.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / LOG_DIR / STOP_FILE
        self._interrupted = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._notice)

    def _notice(self, _number: int, _frame: FrameType | None) -> None:
        self._interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one ends at once

    def __call__(self) -> bool:
        return self._interrupted or self._file.exists()


def agreed(asked: bool, device: torch.device) -> bool:
    """What rank 0 was called with, on every rank. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return asked
    flag = torch.tensor([int(asked)], device=device)
    dist.broadcast(flag, src=0)
    return bool(flag.item())
