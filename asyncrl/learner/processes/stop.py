"""Requests to save a checkpoint and stop: by a file in the run folder, or by Ctrl-C in the terminal of torchrun."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from asyncrl.config import LOG_DIR
from asyncrl.learner.parallel.collectives import text_of_rank_zero
from asyncrl.telemetry.folder.run_folder import STOP_FILE

Asked = Callable[[], bool]


def never() -> bool:
    return False


class StopRequest:
    """Callable: whether this rank was asked to stop.

    The file reaches a rank in any state, even if torchrun has just restarted it. SIGINT is what torchrun forwards for a
    Ctrl-C in its terminal. SIGTERM keeps its effect: torchrun sends it to the remaining ranks after one has died, and
    they should end at once.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / LOG_DIR / STOP_FILE
        self._interrupted = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._notice)

    def _notice(self, _number: int, _frame: FrameType | None) -> None:
        self._interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one ends the process at once

    def __call__(self) -> bool:
        return self._interrupted or self._file.exists()


def agreed(why: str, device: torch.device) -> str:
    """Why rank 0 stops, on every rank; empty if it goes on. Collective."""
    return text_of_rank_zero(why, device)
