"""Folders for temporary files that end with the process that made them, however it ends: what a killed one left goes
when the next is made, or a pool ends."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "asyncrl-held-"
HELD = "held"


@contextlib.contextmanager
def held_folder(parent: str = "") -> Iterator[Path]:
    """An empty folder in `parent`, or in the usual place, that is gone afterwards."""
    clear_away()
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent or None, ignore_cleanup_errors=True) as name,
        Path(name, f"{HELD}.new").open("w") as file,
    ):
        fcntl.flock(file, fcntl.LOCK_EX)
        # Named only once it is locked: see `clear_away`.
        Path(file.name).rename(Path(name, HELD))
        yield Path(name)


def clear_away() -> None:
    """What killed processes of this user have left, in the usual place and in that of sockets."""
    places = {tempfile.gettempdir(), "/tmp"}
    for mark in itertools.chain(*(Path(place).glob(f"{PREFIX}*/{HELD}") for place in places)):
        with contextlib.suppress(OSError):
            if mark.parent.lstat().st_uid != os.geteuid():  # a stranger's may be a pipe, whose opening waits for ever
                continue
            with mark.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(mark.parent, ignore_errors=True)
