"""A full disk: the one place that decides what it means. The run ends and can be resumed; nothing is waited for.

    with disk_space(path, nbytes):
        write(path)                      # DiskFullError instead of what the system or a library says of it

The error's text is also posted to the run's board, because the logs are on the full disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from asyncrl.errors import DiskFullError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of the operating system for a disk without space."""
BOARD_FILE = "waiting"
"""Name of the board file, in the folder of the logs."""
BOARD_BYTES = 1024


@contextlib.contextmanager
def disk_space(path: Path, nbytes: int, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Replace the failure of a write for lack of space by the error that ends the run.

    Args:
        path, nbytes: the file and size to be written.
        errors: exceptions that the write may raise for lack of space.

    Raises:
        DiskFullError: there was no space. One of `errors`: the write failed for another reason.
    """
    try:
        yield
    except errors as error:
        if isinstance(error, DiskFullError) or not is_full(error, path, nbytes):
            raise
        raise disk_full(path, nbytes) from error


def disk_full(path: Path, nbytes: int) -> DiskFullError:
    """Return the error for a write of `nbytes` to `path`, and post its text to the board of the run in which it is."""
    free = free_bytes(path)
    lacking = f", {nbytes - free:,} too few" if 0 <= free < nbytes else ""
    text = (
        f"the disk is full: {path} needs {nbytes:,} bytes and {free:,} are free{lacking}. What was acknowledged and "
        "the last checkpoint are kept: free space, then go on with the same command and resume=auto"
    )
    post(board_of(path), text)
    return DiskFullError(text)


def board_of(path: Path) -> Path | None:
    """Return the board of the run in whose folder `path` is; None if there is none."""
    boards = (place / "logs" / BOARD_FILE for place in path.absolute().parents)
    return next((board for board in boards if board.is_file()), None)


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
