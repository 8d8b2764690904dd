"""Large writes past the page cache: what a journal writes it does not read again before it is restarted.

A buffered write copies into pages that are cold by then and that the sync has to find again, which costs a server more
time than all else it does for a large group. Here the whole blocks of a write are copied into a small buffer that stays
in the processor's cache, and go to the disk from there (`open(2)`, O_DIRECT). The rest takes the ordinary way. Where
the file system has no such writes, everything does.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence

import numpy as np

BLOCK = 4096
"""Bytes that place, size and memory of such a write must be multiples of; no common disk needs more."""
STAGE = 2 << 20
"""Measured best: twice as much no longer stays in the cache, half as much takes more calls."""
WORTH = 64 << 10
"""Bytes of whole blocks below which one buffered write is cheaper."""
MAX_BUFFERS = 512
"""Of one gathered write; Linux takes 1024."""
UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)


def write_all(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Through the page cache, however many calls it takes. Raises OSError."""
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
    """One thread at a time."""

    def __init__(self) -> None:
        self.works = hasattr(os, "O_DIRECT")
        """False from the first refusal on."""
        self._stage: mmap.mmap | None = None

    def write(self, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Put the bytes of `buffers` at `offset`, and touch no others. Raises OSError."""
        size, head = sum(len(buffer) for buffer in buffers), -offset % BLOCK
        whole = (size - head) // BLOCK * BLOCK
        if not self.works or whole < WORTH:
            write_all(descriptor, offset, buffers)
            return
        first, rest = _split(buffers, head)
        blocks, last = _split(rest, whole)
        write_all(descriptor, offset, first)
        if not self._write_blocks(descriptor, offset + head, blocks):
            write_all(descriptor, offset + head, blocks)
        write_all(descriptor, offset + head + whole, last)

    def _write_blocks(self, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> bool:
        """False when not all of it was written: the ordinary way says why."""
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            left = list(buffers)
            while left:
                part, left = _split(left, STAGE)
                staged = self._staged(part)
                if os.pwrite(descriptor, staged, offset) < len(staged):
                    return False
                offset += len(staged)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self.works = False
            return False
        finally:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return True

    def _staged(self, buffers: Sequence[memoryview]) -> memoryview:
        if self._stage is None:
            self._stage = mmap.mmap(-1, STAGE)
        target, at = np.frombuffer(self._stage, np.uint8), 0
        for buffer in buffers:
            target[at : at + len(buffer)] = np.frombuffer(buffer, np.uint8)  # Unlike memoryview, without the GIL.
            at += len(buffer)
        return memoryview(self._stage)[:at]


def _split(buffers: Sequence[memoryview], size: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first `size` bytes, or all there are, and the others."""
    first: list[memoryview] = []
    for place, buffer in enumerate(buffers):
        if len(buffer) > size:
            return ([*first, buffer[:size]] if size else first), [buffer[size:], *buffers[place + 1 :]]
        first.append(buffer)
        size -= len(buffer)
    return first, []
