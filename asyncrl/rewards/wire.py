"""What passes between the pool and its children: length-prefixed msgpack frames, and one shared progress record.

    pool -> child:  [call id, argument, ...]
    child -> pool:  ["ready"] or ["refused", why]; then [call id, answer] or [call id, why it failed]

    of a reward:    (completions, row) -> [[value, parts] or why this one has none, ...]
    of a filter:    (fields of a FinishedGroup) -> [keep, why not]

The progress record is what lets the pool name the guilty call exactly, after a timeout or a crash, although results
are written in batches. Both ends are asyncrl's own processes on one machine.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator
from typing import Any, cast

import msgpack

from asyncrl.errors import WireError

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20
_PROGRESS = struct.Struct("<qd")
PROGRESS_BYTES = _PROGRESS.size
IDLE = 0
"""Call id of the progress record between calls; real ids start at 1."""


def pack_frame(message: list[Any]) -> bytes:
    """One frame. Raises WireError for values msgpack cannot carry (integers beyond 64 bits) or above the size limit."""
    try:
        # JSON text may hold lone surrogates; they must reach the reward function, not stop the group.
        body = cast(bytes, msgpack.packb(message, unicode_errors="surrogatepass"))
    except (OverflowError, ValueError, TypeError) as error:
        raise WireError(f"a value of the row cannot be sent to the reward process: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a reward call of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[list[Any]]:
        """The frames that `data` completes. Raises WireError on an impossible length."""
        self._bytes += data
        start = 0
        while len(self._bytes) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes, start)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"a frame announces {length} bytes, the limit is {MAX_FRAME_BYTES}")
            stop = start + LENGTH.size + length
            if len(self._bytes) < stop:
                break
            body = bytes(self._bytes[start + LENGTH.size : stop])
            start = stop
            yield msgpack.unpackb(body, unicode_errors="surrogatepass", strict_map_key=False)
        del self._bytes[:start]


def begin_call(progress: mmap.mmap, call_id: int) -> None:
    """The child is about to run this call; the time is the system-wide monotonic clock, in seconds."""
    _PROGRESS.pack_into(progress, 0, IDLE, time.monotonic())
    _PROGRESS.pack_into(progress, 0, call_id, time.monotonic())


def end_call(progress: mmap.mmap) -> None:
    _PROGRESS.pack_into(progress, 0, IDLE, time.monotonic())


def read_progress(progress: mmap.mmap) -> tuple[int, float]:
    """`(call id or IDLE, when it began)`."""
    return _PROGRESS.unpack_from(progress, 0)
