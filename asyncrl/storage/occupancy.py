"""Detects whether a run is active in a folder, with a lock that each of its processes on this machine shares.

The lock lasts as long as any of them lives, in whatever order they die.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from asyncrl.utils.process_tree import command_of, is_alive, process_at
from asyncrl.utils.stopped_processes import who

log = logging.getLogger(__name__)

TRIES = 50
TURN_S = 0.1
LEAVES_S, ENDS_S = 2.0, 10.0
"""Limits on the wait for the holder of a file: for one that runs, and for one that is dying or not of this machine."""


@contextmanager
def alone_in(folder: Path) -> Iterator[bool]:
    """Yield whether no process of another run is in `folder`. If so, none may enter until the context ends and the last
    process of the caller's run (`lived_in`) has ended."""
    with _locked(folder, fcntl.LOCK_EX) as handle:
        # No other run is there: downgrade the lock, so that the other processes of this run can share it.
        yield handle is not None and _flock(handle, fcntl.LOCK_SH)


@contextmanager
def lived_in(folder: Path | str) -> Iterator[None]:
    """Mark this process as part of the run in `folder`: while it lives no other run may begin there, whoever has died.

    waits for: a start that is checking the folder, 5 s at most; unblocked by: the end of its check
    """
    with _locked(Path(folder), fcntl.LOCK_SH) as handle:
        if handle is None:
            log.warning("%s is being taken by another run on this machine%s", folder, holders(Path(folder)))
        yield


@contextmanager
def _locked(folder: Path, kind: int) -> Iterator[int | None]:
    """Yields None if others hold the lock. It is released when this process ends, however it ends."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:  # not on this machine: a remote worker, which has nothing to protect
        log.debug("%s cannot be opened: %s", folder, error)
        yield -1
        return
    try:
        # Another start holds the lock exclusively for a moment, to check that nobody is there.
        tries = TRIES if kind == fcntl.LOCK_SH else 1
        yield handle if any(_flock(handle, kind) or time.sleep(TURN_S) for _ in range(tries)) else None
    finally:
        os.close(handle)


@contextmanager
def in_turn(folder: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Let one process at a time into `folder`. `waits` is called if another one is there.

    waits for: the other process; unblocked by: its end, however it ends
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not _flock(handle, fcntl.LOCK_EX):
            waits()
            while not _flock(handle, fcntl.LOCK_EX):
                time.sleep(TURN_S)
        yield
    finally:
        os.close(handle)


@contextmanager
def held_alone(file: Path) -> Iterator[psutil.Process | None]:
    """Hold `file`, which must exist, until the context or this process ends. Yields None, or the process of this
    machine that holds it already.

    waits for: that process, `LEAVES_S`; `ENDS_S` if it is dying (memory of GPUs takes seconds), or if none is visible
    here. unblocked by: its end, however it ends
    """
    handle = os.open(file, os.O_RDWR)  # for writing: network file systems lock no file that is only read
    try:
        yield _holder(handle, file)
    finally:
        os.close(handle)


def _holder(handle: int, file: Path) -> psutil.Process | None:
    begun = time.monotonic()
    while not _flock(handle, fcntl.LOCK_EX):
        running = [process for process in living_in(file) if _has_open(process, file)]
        if time.monotonic() - begun > (LEAVES_S if running else ENDS_S):
            if not running:
                log.warning("%s is held, but by no process that is visible here: is one alive elsewhere?", file)
            return running[0] if running else None
        time.sleep(TURN_S)
    return None


def _has_open(process: psutil.Process, file: Path) -> bool:
    """Whether the process runs and has the file open: its pid may be that of a dead one, whose child holds the lock."""
    if not is_alive(process) or not any(command_of(process)):  # a dying process has no command line any more
        return False
    try:
        return any(each.samefile(file) for each in Path(f"/proc/{process.pid}/fd").iterdir() if each.exists())
    except PermissionError:  # of another user
        return True
    except OSError:  # it has just ended
        return False


def _flock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without such locks
        log.debug("no lock: %s", error)
    return True


def holders(folder: Path) -> str:
    """Processes that hold a lock on the folder, as ` (the replay server, pid 7)`; see `living_in`."""
    named = [f"{who(process)}, pid {process.pid}" for process in living_in(folder)]
    return f" ({'; '.join(named)})" if named else ""


def living_in(folder: Path) -> list[psutil.Process]:
    """Processes that hold a lock on the folder, as far as the kernel of this machine shows."""
    inode = folder.stat().st_ino
    try:
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return []
    pids = {int(row[4]) for row in rows if row[1] == "FLOCK" and row[5].rpartition(":")[2] == str(inode)}
    return [process for pid in sorted(pids) if (process := process_at(pid)) is not None]
