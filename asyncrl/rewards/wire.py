"""Protocol between the pool and its children: length-prefixed msgpack frames, and one shared progress record.

    pool -> child:  [call id, argument, ...]
    child -> pool:  ["ready", whether it uses token ids] or ["refused", why]; then [call id, answer] or
                    [call id, why it failed]

    of a reward:    (completions, row, token ids, finish reasons, turns) -> [[value, parts, rewards of turns] or
                    [reason, why this one has none], ...]; token ids as int32 bytes, and nil for what is not passed
    of a filter:    (fields of a FinishedGroup) -> [keep, why not]

The progress record lets the pool name the guilty call exactly, and the function and completion in it, after a timeout
or a crash, although results are written in batches. Both ends are asyncrl's own processes on one machine.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from asyncrl.errors import WireError
from asyncrl.plain_values import packed, unpacked
from asyncrl.types import Completion

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20
_ID, _CLOCK, _PLACE, _TERM = range(4)
PROGRESS_BYTES = 32
IDLE = 0
"""Call id of the progress record between calls; real ids start at 1."""
WHOLE, TOGETHER = -1, -2
"""Places in the progress record besides those of single completions: one call for all of them, or all at once."""


def pack_frame(message: list[Any]) -> bytes:
    """Encode one frame. Raises WireError for values that cannot be encoded (nested too deep) or above the size
    limit."""
    try:
        body = packed(message)
    except (OverflowError, ValueError, TypeError) as error:
        raise WireError(f"a value of the row cannot be sent to the reward process: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a reward call of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


def told(sampled: Sequence[Completion] | None) -> tuple[list[bytes] | None, list[str] | None]:
    """Return the data sent with the texts of completions: their token ids and finish reasons."""
    if sampled is None:
        return None, None
    packed = [np.ascontiguousarray(one.token_ids, dtype=np.int32).tobytes() for one in sampled]
    return packed, [one.finish_reason for one in sampled]


class FrameBuffer:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[list[Any]]:
        """Yield the frames that `data` completes. Raises WireError on an impossible length."""
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
            yield unpacked(body)
        del self._bytes[:start]


class Progress(NamedTuple):
    call_id: int
    """Call id, or IDLE."""
    began: float
    """Time when this call, this completion of it, or idleness began, by the system-wide monotonic clock, in seconds."""
    place: int
    """Which of the call's completions is being scored, or WHOLE, or TOGETHER."""
    term: int
    """Index of the function that runs, of those of which a reward is composed."""


def begin_call(progress: mmap.mmap, call_id: int) -> None:
    """Record that the child is about to run this call."""
    end_call(progress)
    _whole_numbers(progress)[_ID] = call_id


def begin_place(progress: mmap.mmap, term: int, place: int) -> None:
    """Record that this function of the running call is about to score this completion. The call id stays: if it were
    read as IDLE in between, a process that was busy for long would look like one that hangs outside any call."""
    memoryview(progress).cast("d")[_CLOCK] = time.monotonic()
    numbers = _whole_numbers(progress)
    numbers[_TERM], numbers[_PLACE] = term, place


def end_call(progress: mmap.mmap) -> None:
    _whole_numbers(progress)[_ID] = IDLE
    begin_place(progress, 0, WHOLE)


def read_progress(progress: mmap.mmap) -> Progress:
    numbers = _whole_numbers(progress)
    return Progress(numbers[_ID], memoryview(progress).cast("d")[_CLOCK], numbers[_PLACE], numbers[_TERM])


def _whole_numbers(progress: mmap.mmap) -> memoryview:
    """View for writing each field in one store: `struct` clears memory before it writes, and a clock read as 0 would be
    past every deadline."""
    return memoryview(progress).cast("q")
