"""Repeats on the pool's terminal what its workers log about a server that does not answer: with wrong keys or a wrong
address they wait for minutes, and nobody looks into their logs meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.rollout.pool.log_tail import log_size
from asyncrl.telemetry.live.tails import lines_after

MARK = " WARNING asyncrl.replay.client.connection: "
"""Begins what a worker logs of its connection; without an import of it, the pool stays small."""
EVERY_S = 60.0
"""Shortest time between two lines of one worker."""


@dataclass(slots=True)
class _Tail:
    path: Path
    read: int
    due: float


class Relay:
    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._tails: dict[str, _Tail] = {}

    def begin(self, name: str, log_path: str) -> None:
        """A worker is being started; what its log has so far is not of it."""
        self._tails[name] = _Tail(Path(log_path), log_size(log_path), self._clock())

    def look(self) -> None:
        """Repeat the newest line of each worker. Only logs on this machine are read."""
        for name, tail in self._tails.items():
            lines: list[str] = []
            with contextlib.suppress(OSError):  # a deleted or unreadable log must not end the pool
                lines, tail.read = lines_after(tail.path, tail.read)
            found = [line.partition(MARK)[2] for line in lines if MARK in line]
            if found and self._clock() >= tail.due:
                tail.due = self._clock() + EVERY_S
                self._say(f"worker {name}: {found[-1]}")
