"""Tracing: one record per span of this process, written to `logs/trace/` of the run folder and read by `asyncrl trace`.

A record is msgpack: `[name, lane, begin, end, {attributes}]`, in nanoseconds of the machine's monotonic clock, which
all its processes share. Each record is passed to the kernel when its span ends, so a killed process loses none. The
first record of a file is a map that identifies the process; others give the offset between this machine's clock and the
replay server's.

Until `begin` is called, and in a forked child, everything here does nothing.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgpack

FOLDER, SUFFIX, OLDER = "trace", ".spans", ".older.spans"
FORMAT = 1
FILE_BYTES = 32 << 20
"""Size limit of each of the two files that a process fills in turn. The newest spans are kept."""
FILES_KEPT = 8
"""Processes of one role whose spans are kept, so that one that restarts again and again does not fill the disk."""
MAIN = "main"
"""Lane of the main thread. `lap` covers it without gaps."""

now = time.monotonic_ns
_packed: Callable[[Any], bytes] = msgpack.packb  # pyright: ignore[reportAssignmentType]


class SpanFile:
    """The span file of this process. It is created with the first span; if somebody deletes it, a new one is created
    when the old one would have been full. Spans that cannot be written are dropped and counted."""

    def __init__(self, folder: Path, role: str, limit: int = FILE_BYTES) -> None:
        self._name = re.sub(r"[^\w.-]+", "_", role)
        self._path = folder / f"{self._name}@{time.time_ns() // 1_000_000}-{os.getpid()}{SUFFIX}"
        self._limit = limit
        self._lock = threading.Lock()
        self._file = -1
        self._size = 0
        self.mark = born()
        self.lost = 0
        self._head = {"format": FORMAT, "role": role, "pid": os.getpid(), "host": socket.gethostname(), "boot": boot()}
        self._head |= {"born": self.mark, "wall": time.time_ns() - now()}

    def write(self, record: list[Any] | dict[str, Any]) -> None:
        content = _packed(record)
        with self._lock:
            try:
                if self._size > self._limit:
                    self._close()
                    self._path.replace(self._path.with_name(self._path.name.removesuffix(SUFFIX) + OLDER))
                if self._file < 0:
                    self._open()
                self._append(content)
            except OSError:  # a full disk or a deleted folder must not end the run
                self.lost += 1

    def _open(self) -> None:
        folder = self._path.parent
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob(f"{self._name}@*{SUFFIX}"))[:-FILES_KEPT]:
            old.unlink(missing_ok=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            self._append(_packed(self._head | {"lost": self.lost}))
        except OSError:
            self._close()
            raise

    def _append(self, content: bytes) -> None:
        if os.write(self._file, content) < len(content):
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, self._size, os.SEEK_SET)
            raise OSError("no space for a whole record")
        self._size += len(content)

    def _close(self) -> None:
        os.close(self._file)
        self._file, self._size = -1, 0  # otherwise the next open file would be written to, or closed, by mistake


_file: SpanFile | None = None


def begin(folder: Path, role: str, limit: int = FILE_BYTES) -> None:
    """From now on, write this process's spans to `folder`."""
    global _file
    _file = SpanFile(folder, role, limit)


def end() -> None:
    """Stop tracing. The time since the last `lap` is recorded as this process's end."""
    global _file
    lap("end")
    _file = None


def _forget() -> None:
    global _file
    _file = None


os.register_at_fork(after_in_child=_forget)
atexit.register(end)


def note(name: str, begin: int, end: int, lane: str = "", **of: Any) -> None:
    """Record a span that is over. Spans of a lane must be nested or disjoint; spans with `group` (and `attempt`) belong
    to the lane of their group. The default lane is the thread's. A span of length 0 is a moment."""
    file = _file  # another thread may call `end` meanwhile
    if file is not None:
        file.write([name, lane or _lane(), begin, end, of])


def moment(name: str, **of: Any) -> None:
    if _file is not None:
        at = now()
        note(name, at, at, **of)


def lap(name: str, at: int = 0, **of: Any) -> None:
    """Record the main thread's time since the last lap (or the process's start) until now, or `at`, as `name`."""
    file = _file
    if file is not None:
        at = at or now()
        file.write([name, MAIN, file.mark, at, of])
        file.mark = at


def since_lap() -> int:
    """Nanoseconds since the last lap; 0 if tracing is off."""
    return now() - _file.mark if _file is not None else 0


def clocks(server: str, offset: int, error: int) -> None:
    """At this moment the clock of the replay server, on the machine that has booted as `server`, is `offset` ns ahead
    of this one's, give or take `error`."""
    if _file is not None:
        _file.write({"server": server, "at": now(), "offset": offset, "error": error})


class span:
    """`with span("forward", step=3):`. Written when it ends, however it does."""

    __slots__ = ("_begin", "_lane", "_name", "_of")

    def __init__(self, name: str, lane: str = "", **of: Any) -> None:
        self._name, self._lane, self._of = name, lane, of
        self._begin = 0

    def __enter__(self) -> Self:
        if _file is not None:
            self._begin = now()
        return self

    def __exit__(self, *_: object) -> None:
        file = _file
        if file is not None and self._begin:
            file.write([self._name, self._lane or _lane(), self._begin, now(), self._of])

    def also(self, **of: Any) -> None:
        """Add attributes that were not known when the span began."""
        self._of |= of


def _lane() -> str:
    thread = threading.current_thread()
    return MAIN if thread is threading.main_thread() else thread.name


def boot() -> str:
    """Identifies the running kernel: processes with the same value share a monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()} {round(time.time() - time.monotonic())}"


def born() -> int:
    """When this process began, in ns of the monotonic clock, to the 10 ms that the kernel records; `now` if unknown."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now()
    return now() - max(0, int(age * 1e9))
