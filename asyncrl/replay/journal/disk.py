"""The interface by which the journal uses a folder of files. It is small, so that tests can replace it by one that
simulates a power loss."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from asyncrl.errors import JournalError
from asyncrl.replay.journal.direct import DirectWriter
from asyncrl.storage.sealed import replace_durably, sync

Bytes = bytes | memoryview

KEPT_OPEN = 8
"""Limit on open descriptors of segments: the one being written, those being recycled, and a few more."""
LOCK_FILE = "lock"


class Disk(Protocol):
    """Every call may raise OSError. Written data survives a power loss only after `sync(name)`, a name only after
    `sync_folder()`."""

    def names(self) -> list[str]: ...

    def size(self, name: str) -> int: ...

    def create(self, name: str, nbytes: int) -> None:
        """Create a file of `nbytes` zeros, with its space allocated."""
        ...

    def write(self, name: str, offset: int, buffers: Sequence[Bytes]) -> None:
        """Write bytes at `offset`. The bytes after them, up to the next multiple of 4096, may be zeroed."""
        ...

    def put(self, name: str, content: bytes) -> None:
        """Replace the small file `name` by this content, atomically and durably."""
        ...

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return up to `nbytes` bytes; fewer at the end of the file."""
        ...

    def sync(self, name: str) -> None: ...

    def sync_folder(self) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def remove(self, name: str) -> None: ...

    def truncate(self, name: str, nbytes: int) -> None: ...

    def close(self) -> None: ...


class FolderDisk:
    """`Disk` on a folder of the file system. With `locked`, no other process may lock it.

    Raises:
        JournalError: another process has locked the folder.
    """

    def __init__(self, folder: Path, *, locked: bool) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}
        self._writer = DirectWriter()
        self._lock: int | None = None
        if locked:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
            self._close_to_others()

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self._folder.iterdir() if entry.name != LOCK_FILE)

    def size(self, name: str) -> int:
        return (self._folder / name).stat().st_size

    def create(self, name: str, nbytes: int) -> None:
        path = self._folder / name
        # Readable by the owner only: the file contains the token of the weights' server.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            # Allocated now, space cannot run out in the middle of a record; and a growing file syncs far slower.
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        self._open[name] = descriptor
        self._close_oldest()

    def write(self, name: str, offset: int, buffers: Sequence[Bytes]) -> None:
        views = [memoryview(buffer) for buffer in buffers if len(buffer)]
        if views:
            self._writer.write(name, self._descriptor(name), offset, views)

    def put(self, name: str, content: bytes) -> None:
        replace_durably(self._folder / name, content)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        # A buffered file repeats the read: the system returns less than 2 GiB at once, and the rest would seem missing.
        with (self._folder / name).open("rb") as file:
            file.seek(offset)
            return file.read(nbytes)

    def sync(self, name: str) -> None:
        os.fdatasync(self._descriptor(name))

    def sync_folder(self) -> None:
        sync(self._folder)

    def rename(self, old: str, new: str) -> None:
        (self._folder / old).rename(self._folder / new)
        if old in self._open:
            self._open[new] = self._open.pop(old)

    def remove(self, name: str) -> None:
        self._forget(name)
        (self._folder / name).unlink()

    def truncate(self, name: str, nbytes: int) -> None:
        os.truncate(self._folder / name, nbytes)

    def close(self) -> None:
        for name in list(self._open):
            self._forget(name)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            self._open[name] = os.open(self._folder / name, os.O_RDWR)
            self._close_oldest()
        return self._open[name]

    def _close_oldest(self) -> None:
        """Close the oldest descriptors: a journal that keeps all its segments would otherwise run out of them."""
        for name in list(self._open)[:-KEPT_OPEN]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        with contextlib.suppress(KeyError):
            os.close(self._open.pop(name))

    def _close_to_others(self) -> None:
        """Remove the access of other users from existing segments, which are reused with the mode they have."""
        for name in self.names():
            mode = stat.S_IMODE((self._folder / name).stat().st_mode)
            if mode & 0o007:
                with contextlib.suppress(OSError):  # owned by another user, or on a file system without modes
                    (self._folder / name).chmod(mode & 0o770)

    def _take_lock(self) -> int:
        descriptor = os.open(self._folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise JournalError(
                f"{self._folder} is being written by another replay server. Stop that one, or give another run.dir"
            ) from error
        return descriptor
