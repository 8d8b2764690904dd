"""Waits for disk space: what every writer into the run folder does while its disk is full.

waits for:    space, polled every RETRY_S; at most `Patience.limit_s`
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
"""Error numbers of the operating system for a disk without space."""
RETRY_S = 1.0
SAY_S = 60.0
BOARD_FILE = "waiting"
"""Name of the board file, in the folder of the logs."""
BOARD_BYTES = 1024
IS_FULL = "the disk is full: "
"""Prefix of the board's text while a writer waits."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a full disk, and where to report it in addition to the log."""

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
        """Return the result of `write`. It is called again while it fails for lack of space, and must then start over.

        Args:
            path, nbytes: the file and size to be written, for the message.
            errors: exceptions that `write` may raise for lack of space.

        Raises:
            DiskFullError: there was no space for `limit_s`. One of `errors`: `write` failed for another reason.
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
    """One wait for space, for callers that have other work to do meanwhile."""

    patience: Patience
    since: float | None = None
    _said_at: float = field(default=0.0, init=False)

    def note(self, path: Path, nbytes: int) -> None:
        """Record that writing `nbytes` to `path` failed. Logged at once, then once a minute.

        Raises:
            DiskFullError: the disk has been full for longer than the patience lasts.
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
        """The write succeeded: end the wait."""
        if self.since is not None:
            text = f"there is space again after {self.patience.clock() - self.since:.0f} s: going on"
            self.since = None
            post(self.patience.board, text)
            log.warning("%s", text)


def is_full(error: BaseException, path: Path, nbytes: int) -> bool:
    """Whether `error`, or one of its causes, says that there was no space for `nbytes`. Some libraries hide the error
    number; then the free space decides."""
    if any(f"(os error {number})" in str(error) for number in FULL):  # safetensors
        return True
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            return seen.errno in FULL
        seen = seen.__cause__ or seen.__context__
    return 0 <= free_bytes(path) < nbytes


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of `path`, or of its nearest existing parent; -1 if unknown."""
    for place in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return -1


def make_board(path: Path) -> None:
    """Create a file with all of its bytes allocated, so that it can be overwritten on a full disk. Raises OSError."""
    with path.open("wb") as file:
        file.write(b" " * BOARD_BYTES)


def post(board: Path | None, text: str) -> None:
    """Overwrite the board with `text`: the logs are on the full disk, and `asyncrl local` shows the board instead. Does
    nothing if there is no board."""
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
    """The board's text; empty if there is none."""
    try:
        return path.read_bytes().decode(errors="replace").strip()
    except OSError:
        return ""


def append_whole(path: Path, content: bytes) -> None:
    """Append all of `content` to the file, or nothing.

    Raises:
        OSError: writing failed; with an errno in `FULL` if there was no space.
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
