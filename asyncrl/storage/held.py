"""Folders for temporary files that end with the process that made them, however it ends: what a killed one left goes
when the next is made, or a pool ends. So does memory that its processes share."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PREFIX = "asyncrl-held-"
HELD = "held"
SHARED = "shared"
"""In such a folder: names in /dev/shm that end with it, each with the number of its file."""
MEMORY = Path("/dev/shm")


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
        try:
            yield Path(name)
        finally:
            _unlink_shared(Path(name))


def shared_by(pids: Iterable[int], named: tuple[str, ...]) -> dict[str, int]:
    """Memory that these processes have mapped by a name in /dev/shm that begins so, with the numbers of its files."""
    mapped: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapped |= {line.partition(f" {MEMORY}/")[2] for line in lines}
    found: dict[str, int] = {}
    for name in mapped:
        with contextlib.suppress(OSError):  # deleted
            found |= {name: (MEMORY / name).lstat().st_ino} if name.startswith(named) else {}
    return found


def hold_shared(folder: Path, found: Mapping[str, int]) -> None:
    """What is `shared_by` processes ends with a held folder: killed, they leave it."""
    (folder / SHARED).write_text(json.dumps(found))


def _unlink_shared(folder: Path) -> None:
    """What is still there of it; a file that has come by the same name since stays."""
    with contextlib.suppress(OSError, ValueError):  # none, or its owner was killed while it wrote
        for name, number in json.loads((folder / SHARED).read_text()).items():
            with contextlib.suppress(OSError):
                path = MEMORY / Path(name).name
                if (path.lstat().st_ino, path.lstat().st_uid) == (number, os.geteuid()):
                    path.unlink()


def clear_away() -> None:
    """What killed processes of this user have left, in the usual place and in that of sockets."""
    places = {tempfile.gettempdir(), "/tmp"}
    for mark in itertools.chain(*(Path(place).glob(f"{PREFIX}*/{HELD}") for place in places)):
        with contextlib.suppress(OSError):
            if mark.parent.lstat().st_uid != os.geteuid():  # a stranger's may be a pipe, whose opening waits for ever
                continue
            with mark.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _unlink_shared(mark.parent)
                shutil.rmtree(mark.parent, ignore_errors=True)
