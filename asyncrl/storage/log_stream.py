"""Standard output and error of a process whose logs are files: a full disk holds lines back, and ends nobody.

Neither can wait as other writers do: a server that stands still for a line of its log is a dead server to its peers.
"""

from __future__ import annotations

import io
import os
import stat
import sys
import threading

from asyncrl.plain_text import PlainStream
from asyncrl.storage.full_disk import FULL

KEPT_BYTES = 1 << 20
"""Held back while the disk is full; what comes after is counted and left out."""


class LogStream(io.RawIOBase):
    """Writes to the descriptor `target`; never raises for want of space."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._held = bytearray()
        self._left_out = 0
        self._lock = threading.Lock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._target

    def write(self, data: bytes | memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        content = bytes(data)
        with self._lock:
            if len(self._held) + len(content) > KEPT_BYTES:
                self._left_out += len(content)
            else:
                self._held += content
            self._push()
        return len(content)

    def _push(self) -> None:
        try:
            while self._held:
                del self._held[: os.write(self._target, self._held)]
                if not self._held and self._left_out:
                    said = f"\n({self._left_out} bytes of this log were left out while the disk was full)\n"
                    self._held += said.encode()
                    self._left_out = 0
        except OSError as error:
            if error.errno not in FULL:
                raise


def take_pipes() -> tuple[int, int]:
    """Standard input and output, moved off the descriptors 0 and 1: a `print` of user code goes to the log, and is no
    answer. On a full disk it fails nothing (`keep_logging`)."""
    taken = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    keep_logging()
    return taken


def keep_logging() -> None:
    """Where standard output or error is a file, let it hold lines back on a full disk; elsewhere change nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            descriptor = stream.fileno()
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        except (OSError, ValueError, AttributeError):  # closed, none at all, or a test's
            continue
        if is_file:
            stream.flush()
            raw = LogStream(descriptor)
            setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", errors="replace", write_through=True))  # pyright: ignore[reportArgumentType]
            if isinstance(stream, PlainStream):
                setattr(sys, name, PlainStream(getattr(sys, name)))  # foreign text stays plain
