"""Standard output and error of a process whose logs are files. A full disk delays lines, and never ends the process.

Logging cannot wait as other writers do: to its peers, a server that blocks on a line of its log is a dead server.
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
"""Limit on the bytes that are held back while the disk is full. Later output is counted and dropped."""


class LogStream(io.RawIOBase):
    """Writes to the descriptor `target`; never raises for lack of space."""

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
    """Move standard input and output off the descriptors 0 and 1, and return their new descriptors, so that a `print`
    in user code goes to the log and not into the answer. It does not fail on a full disk (`keep_logging`)."""
    taken = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    redirect_streams(2)
    return taken


def redirect_streams(target: int) -> None:
    """Point standard output and error, of this process and of what it starts, at the descriptor `target`.

    The Python streams are opened anew: one that was opened on a file asks for its position later, which a terminal or a
    pipe on the same descriptor refuses ("Illegal seek").
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None:  # a process started without it
            stream.flush()
        if target != descriptor:
            os.dup2(target, descriptor)
        fresh = io.TextIOWrapper(
            open(descriptor, "wb", buffering=0, closefd=False),  # noqa: SIM115
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )
        setattr(sys, name, PlainStream(fresh) if isinstance(stream, PlainStream) else fresh)
    keep_logging()


def keep_logging() -> None:
    """If standard output or error is a file, make it hold lines back on a full disk; otherwise change nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            descriptor = stream.fileno()
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        except (OSError, ValueError, AttributeError):  # closed, missing, or replaced by a test
            continue
        if is_file:
            stream.flush()
            raw = LogStream(descriptor)
            setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", errors="replace", write_through=True))  # pyright: ignore[reportArgumentType]
            if isinstance(stream, PlainStream):
                setattr(sys, name, PlainStream(getattr(sys, name)))  # control characters in foreign text stay escaped
