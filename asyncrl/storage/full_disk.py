"""The wait for space: what whoever writes into the run folder does while its disk is full.

waits for:    space, asked for once per RETRY_S; at most `Patience.limit_s`
unblocked by: a write that fits
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from asyncrl.errors import DiskFullError

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the operating system says of a disk without space."""
RETRY_S = 1.0
SAY_S = 60.0
BOARD_FILE = "waiting"
"""In the folder of the logs."""
BOARD_BYTES = 1024
IS_FULL = "the disk is full: "
"""Begins what the board says while somebody waits."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a full disk is waited out, and where it is said besides in the log."""

    limit_s: float = 3600.0
    board: Path | None = None
    """See `post`."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def through(
        self,
        path: Path,
        nbytes: int,
        write: Callable[[], Result],
        errors: tuple[type[Exception], ...] = (OSError,),
    ) -> Result:
        """What `write` gives. While it fails for want of space it is called again: it must begin anew each time.

        Args:
            path, nbytes: what cannot be written, for the message.
            errors: what `write` may raise for want of space.

        Raises:
            DiskFullError: there was no space for `limit_s`. One of `errors`: `write` failed in another way.
        """
        full = FullDisk(self)
        while True:
            try:
                result = write()
            except errors as error:
                if not is_full(error, path, nbytes):
                    raise
                full.note(path, nbytes)
            else:
                full.over()
                return result
            self.sleep(RETRY_S)


@dataclass(slots=True)
class FullDisk:
    """One wait for space, or none: for those who have more to do than to wait."""

    patience: Patience
    since: float | None = None
    _said_at: float = field(default=0.0, init=False)

    def note(self, path: Path, nbytes: int) -> None:
        """`nbytes` could not be written to `path`, again. Said at once, then once a minute.

        Raises:
            DiskFullError: it has been so for longer than the patience lasts.
        """
        now = self.patience.clock()
        first = self.since is None
        self.since = since = now if self.since is None else self.since
        wanted = f"{path} needs {nbytes:,} bytes and {free_bytes(path):,} are free"
        if now - since >= self.patience.limit_s:
            text = (
                f"the disk was full for {now - since:.0f} s (run.disk_patience_s={self.patience.limit_s:g}): {wanted}. "
                "What was acknowledged and the last checkpoint are kept: free space, then go on with resume=auto"
            )
            post(self.patience.board, text)
            raise DiskFullError(text)
        if first or now - self._said_at >= SAY_S:
            self._said_at = now
            text = (
                f"{IS_FULL}{wanted}. Nothing is lost; waited {now - since:.0f} s for space, of "
                f"{self.patience.limit_s:g} (run.disk_patience_s)"
            )
            post(self.patience.board, text)
            log.error("%s", text)

    def over(self) -> None:
        """It fits."""
        if self.since is not None:
            text = f"there is space again after {self.patience.clock() - self.since:.0f} s: going on"
            self.since = None
            post(self.patience.board, text)
            log.warning("%s", text)


def is_full(error: BaseException, path: Path, nbytes: int) -> bool:
    """Whether `error`, or what it came of, says that `nbytes` found no space. Libraries hide the number of the error:
    then the space itself tells."""
    if any(f"(os error {number})" in str(error) for number in FULL):  # safetensors
        return True
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            return seen.errno in FULL
        seen = seen.__cause__ or seen.__context__
    return 0 <= free_bytes(path) < nbytes


def free_bytes(path: Path) -> int:
    """On the disk of `path`, or of the nearest folder above it that exists; -1 where nobody says."""
    for place in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return -1


def make_board(path: Path) -> None:
    """A file whose bytes are taken already, so that what is written over them fits on a full disk. Raises OSError."""
    with path.open("wb") as file:
        file.write(b" " * BOARD_BYTES)


def post(board: Path | None, text: str) -> None:
    """Write `text` over what stands on the board: the logs are on the disk that is full, and `asyncrl local` shows this
    instead. Does nothing where there is no board."""
    if board is None:
        return
    line = text.encode()[: BOARD_BYTES - 1].ljust(BOARD_BYTES - 1) + b"\n"
    with contextlib.suppress(OSError):
        descriptor = os.open(board, os.O_WRONLY)
        try:
            os.pwrite(descriptor, line, 0)
        finally:
            os.close(descriptor)


def read_board(path: Path) -> str:
    """What stands there; empty where there is nothing."""
    try:
        return path.read_bytes().decode(errors="replace").strip()
    except OSError:
        return ""


def append_whole(path: Path, content: bytes) -> None:
    """All of `content` at the end of the file, or nothing.

    Raises:
        OSError: it could not be written; of `FULL` where there is no space.
    """
    with path.open("ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        try:
            written = file.write(content)
            if written != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(file.fileno(), before)
            raise
