"""Wakes a thread that polls sockets, from any other thread, by a pipe inside the process."""

from __future__ import annotations

import contextlib
import os


class Wakeup:
    """`heard` must be called in the thread that polls `fd`."""

    def __init__(self) -> None:
        self.fd, self._end = os.pipe()
        for descriptor in (self.fd, self._end):
            os.set_blocking(descriptor, False)
        self._rung = False

    def ring(self) -> None:
        """Wake the thread, once for everything that it will find when it wakes up."""
        if not self._rung:
            self._rung = True
            os.write(self._end, b"\0")

    def heard(self) -> None:
        """Clear the signal. The thread calls it before it reads its input, so that anything later wakes it again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)
        self._rung = False

    def close(self) -> None:
        """Nobody may ring or poll any more."""
        for descriptor in (self.fd, self._end):
            os.close(descriptor)
