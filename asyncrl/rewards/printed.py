"""Standard output and error of user code, with a limit: a function that prints for each completion floods nothing."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from typing import TextIO

LINES = 20
"""Lines passed on in each period."""
PERIOD_S = 60.0
LONGEST = 2000
"""Limit on the characters passed on of a line."""


class LimitedStream(io.TextIOBase):
    """Passes on `LINES` lines in each `PERIOD_S`, and says how many it left out."""

    def __init__(self, target: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._target, self._clock = target, clock
        self._since, self._passed, self._left_out = clock(), 0, 0
        self._line = 0
        """Characters of the current line so far."""
        self._lock = threading.RLock()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._target.encoding

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._target.fileno()

    def isatty(self) -> bool:
        return False

    def flush(self) -> None:
        self._target.flush()

    def write(self, text: str, /) -> int:
        with self._lock:
            for line in text.splitlines(keepends=True):
                self._take(line)
        return len(text)

    def _take(self, line: str) -> None:
        now = self._clock()
        if now - self._since >= PERIOD_S and not self._line:
            if self._left_out:
                self._target.write(f"({self._left_out} lines that user code printed were left out)\n")
            self._since, self._passed, self._left_out = now, 0, 0
        ends = line.endswith(("\n", "\r"))
        if self._passed < LINES:
            kept = line.rstrip("\r\n")[: max(0, LONGEST - self._line)]
            self._target.write(kept + "\n" * ends)
        elif self._passed == LINES and not self._left_out and not self._line:
            self._target.write(f"(more that user code prints within {PERIOD_S:g} s is left out)\n")
        self._line = 0 if ends else self._line + len(line)
        if ends:
            self._left_out += self._passed >= LINES
            self._passed += self._passed < LINES
