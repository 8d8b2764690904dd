"""Writes of a log past the page cache: what a journal writes it does not read again before it is restarted.

A buffered write copies into pages that are cold by then and that the sync has to find again, which costs a server more
time than all else it does for a large group. Here what is written is copied into a small buffer that stays in the
processor's cache, and goes to the disk from there in whole blocks (`open(2)`, O_DIRECT): the first with the bytes that
stand before it, the last with zeros behind it. Two threads share what is long, so that the disk works while the next
part is copied. Where the file system has no such writes, everything takes the ordinary way.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

BLOCK = 4096
"""Bytes that place, size and memory of such a write must be multiples of; no common disk needs more."""
STAGE = 2 << 20
"""Measured best: twice as much no longer stays in the cache, half as much takes more calls."""
MAX_BUFFERS = 512
"""Of one gathered write; Linux takes 1024."""
UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)
_Part = tuple[int, list[memoryview]]
"""`(offset, what is to be there)`, at most `STAGE` bytes."""


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
    """Of one log, one thread at a time."""

    def __init__(self) -> None:
        self.works = hasattr(os, "O_DIRECT")
        """False from the first refusal on."""
        self._lanes = _Lane(), _Lane()
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="journal-beside")
        self._tail: tuple[str, int, bytes] = ("", 0, b"")
        """`(file, offset, what stands there)` of the block that was written last."""

    def write(self, name: str, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Put the bytes of `buffers` at `offset` of the file `name`. What follows them in their last block, which in a
        log is nothing, may be zeros afterwards. Raises OSError."""
        start = offset // BLOCK * BLOCK
        if self.works:
            before = self._before(name, descriptor, start, offset - start)
            if self._write_blocks(name, descriptor, start, [before, *buffers]):
                return
        self._tail = ("", 0, b"")
        write_all(descriptor, offset, buffers)

    def close(self) -> None:
        self._beside.shutdown()

    def _before(self, name: str, descriptor: int, start: int, size: int) -> memoryview:
        """The `size` bytes at `start`; zeros beyond the end of the file."""
        known, at, content = self._tail
        if known != name or at != start or len(content) < size:
            content = os.pread(descriptor, size, start) if size else b""
        return memoryview(content[:size].ljust(size, b"\0"))

    def _write_blocks(self, name: str, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> bool:
        """False when not all of it was written: the ordinary way says why."""
        parts, size = _parts(offset, buffers)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            if not self._write_parts(descriptor, parts):
                return False
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self.works = False
            return False
        finally:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        last = (size - 1) // BLOCK * BLOCK
        self._tail = (name, offset + last, _end(buffers, size - last))
        return True

    def _write_parts(self, descriptor: int, parts: deque[_Part]) -> bool:
        one, other = self._lanes
        if len(parts) == 1:
            return one.write(descriptor, parts)
        beside = self._beside.submit(other.write, descriptor, parts)
        try:
            done = one.write(descriptor, parts)
        finally:
            wait((beside,))  # Or it would go on with a descriptor that is no longer its.
        return beside.result() and done


class _Lane:
    """One thread's memory to write from."""

    def __init__(self) -> None:
        self._stage: mmap.mmap | None = None

    def write(self, descriptor: int, parts: deque[_Part]) -> bool:
        """The next part for as long as there is one. False when one was not written whole; the others are left out."""
        try:
            while parts:
                offset, buffers = parts.popleft()
                staged = self._staged(buffers)
                if os.pwrite(descriptor, staged, offset) < len(staged):
                    parts.clear()
                    return False
        except IndexError:  # The other lane was faster.
            return True
        except OSError:
            parts.clear()
            raise
        return True

    def _staged(self, buffers: Sequence[memoryview]) -> memoryview:
        """In whole blocks."""
        if self._stage is None:
            self._stage = mmap.mmap(-1, STAGE)
        target, at = np.frombuffer(self._stage, np.uint8), 0
        for buffer in buffers:
            target[at : at + len(buffer)] = np.frombuffer(buffer, np.uint8)  # Unlike memoryview, without the GIL.
            at += len(buffer)
        end = -(-at // BLOCK) * BLOCK
        target[at:end] = 0
        return memoryview(self._stage)[:end]


def _parts(offset: int, buffers: Sequence[memoryview]) -> tuple[deque[_Part], int]:
    """And the number of bytes in all."""
    parts: deque[_Part] = deque()
    room = 0
    start = offset
    for buffer in buffers:
        while len(buffer):
            if not room:
                parts.append((offset, []))
                room = STAGE
            piece, buffer = buffer[:room], buffer[room:]
            parts[-1][1].append(piece)
            room -= len(piece)
            offset += len(piece)
    return parts, offset - start


def _end(buffers: Sequence[memoryview], nbytes: int) -> bytes:
    """The last `nbytes` bytes."""
    pieces: list[memoryview] = []
    for buffer in reversed(buffers):
        pieces.append(buffer[max(0, len(buffer) - nbytes) :])
        nbytes -= len(pieces[-1])
        if not nbytes:
            break
    return b"".join(reversed(pieces))
