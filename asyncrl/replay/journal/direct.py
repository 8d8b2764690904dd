"""Writes a log past the page cache: a journal does not read what it has written until it is restarted.

A buffered write copies into pages that are cold by then and that the sync has to find again, which costs a server more
time than all its other work for a large group. Here the data is copied into a small buffer that stays in the
processor's cache, and written from there in whole blocks (`open(2)`, O_DIRECT): the first block begins with the bytes
already in the file, the last is padded with zeros. If the file system does not support such writes, they are buffered.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence

import numpy as np

BLOCK = 4096
"""Alignment in bytes of the offset, size and memory of a direct write; no common disk needs more."""
STAGE = 2 << 20
"""Size of the buffer in bytes. Measured best: twice as much no longer stays in the cache, half as much takes more
calls."""
MAX_BUFFERS = 512
"""Limit on the buffers of one gathered write; Linux accepts 1024."""
UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)


def write_all(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Write through the page cache, in as many calls as it takes. Raises OSError."""
    left = list(buffers)
    while left:
        part = left[:MAX_BUFFERS]
        written = os.pwritev(descriptor, part, offset)
        offset += written
        while part and written >= len(part[0]):
            written -= len(part.pop(0))
            left.pop(0)
        if written:
            left[0] = left[0][written:]


class DirectWriter:
    """Writes the files of one log, from one thread at a time."""

    def __init__(self) -> None:
        self.works = hasattr(os, "O_DIRECT")
        """Whether direct writes are supported; False after the first refusal."""
        self._stage: mmap.mmap | None = None
        self._tail: tuple[str, int, bytes] = ("", 0, b"")
        """`(file, offset, content)` of the last block written."""

    def write(self, name: str, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write the bytes of `buffers` at `offset` of the file `name`. The rest of their last block, which in a log is
        unused, may be zeroed. Raises OSError."""
        start = offset // BLOCK * BLOCK
        if self.works:
            before = self._before(name, descriptor, start, offset - start)
            if self._write_blocks(name, descriptor, start, [before, *buffers]):
                return
        self._tail = ("", 0, b"")
        write_all(descriptor, offset, buffers)

    def _before(self, name: str, descriptor: int, start: int, size: int) -> memoryview:
        """Return the `size` bytes at `start`; zeros beyond the end of the file."""
        known, at, content = self._tail
        if known != name or at != start or len(content) < size:
            content = os.pread(descriptor, size, start) if size else b""
        return memoryview(content[:size].ljust(size, b"\0"))

    def _write_blocks(self, name: str, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> bool:
        """Return False if not everything was written; a buffered write then reports the reason."""
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            left = list(buffers)
            while left:
                part, left = _split(left, STAGE)
                staged, size = self._staged(part)
                if os.pwrite(descriptor, staged, offset) < len(staged):
                    return False
                last = (size - 1) // BLOCK * BLOCK
                self._tail = (name, offset + last, bytes(staged[last:size]))
                offset += size
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self.works = False
            return False
        finally:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return True

    def _staged(self, buffers: Sequence[memoryview]) -> tuple[memoryview, int]:
        """Returns `(whole blocks, number of bytes without padding)`."""
        if self._stage is None:
            self._stage = mmap.mmap(-1, STAGE)
        target, at = np.frombuffer(self._stage, np.uint8), 0
        for buffer in buffers:
            target[at : at + len(buffer)] = np.frombuffer(buffer, np.uint8)  # numpy copies without the GIL.
            at += len(buffer)
        end = -(-at // BLOCK) * BLOCK
        target[at:end] = 0
        return memoryview(self._stage)[:end], at


def _split(buffers: Sequence[memoryview], size: int) -> tuple[list[memoryview], list[memoryview]]:
    """Split buffers into the first `size` bytes (or fewer if there are no more) and the rest."""
    first: list[memoryview] = []
    for place, buffer in enumerate(buffers):
        if len(buffer) > size:
            return ([*first, buffer[:size]] if size else first), [buffer[size:], *buffers[place + 1 :]]
        first.append(buffer)
        size -= len(buffer)
    return first, []
