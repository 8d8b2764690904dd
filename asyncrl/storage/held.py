"""Temporary folders that are removed with the process that made them, however it ends: the folders of a killed process
are removed when the next one is made, or when a pool ends. The same holds for memory that its processes share."""

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
"""A file in such a folder. It maps the names in /dev/shm that are to be removed with it to their inode numbers."""
MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def held_folder(parent: str = "") -> Iterator[Path]:
    """Yield an empty folder in `parent`, or in the default place for temporary files; it is removed afterwards."""
    clear_away(parent)
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent or None, ignore_cleanup_errors=True) as name,
        Path(name, f"{HELD}.new").open("w") as file,
    ):
        # Some network file systems have no locks: there, what a killed process left stays.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        # Renamed only once it is locked: see `clear_away`.
        Path(file.name).rename(Path(name, HELD))
        try:
            yield Path(name)
        finally:
            _unlink_shared(Path(name))


def shared_by(pids: Iterable[int], named: tuple[str, ...]) -> dict[str, int]:
    """Files in /dev/shm that these processes have mapped, of names that start with one of `named`: name -> inode."""
    mapped: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapped |= {line.partition(f" {MEMORY}/")[2] for line in lines}
    found: dict[str, int] = {}
    for name in mapped:
        with contextlib.suppress(OSError):  # deleted
            found |= {name: (MEMORY / name).lstat().st_ino} if name.startswith(named) else {}
    return found


def hold_shared(folder: Path, found: Mapping[str, int]) -> None:
    """Record shared memory (from `shared_by`) to be removed with a held folder: killed processes leave it behind."""
    (folder / SHARED).write_text(json.dumps(found))


def _unlink_shared(folder: Path) -> None:
    """Remove the recorded shared memory. A newer file with the same name is kept."""
    with contextlib.suppress(OSError, ValueError):  # no record, or its owner was killed while writing it
        for name, number in json.loads((folder / SHARED).read_text()).items():
            with contextlib.suppress(OSError):
                path = MEMORY / Path(name).name
                if (path.lstat().st_ino, path.lstat().st_uid) == (number, os.geteuid()):
                    path.unlink()


def clear_away(parent: str = "") -> None:
    """Remove what killed processes of this user left, in `parent`, the default place for temporary files and that of
    sockets."""
    places = {tempfile.gettempdir(), "/tmp"} | ({parent} if parent else set())
    for mark in itertools.chain(*(Path(place).glob(f"{PREFIX}*/{HELD}") for place in places)):
        with contextlib.suppress(OSError):
            if mark.parent.lstat().st_uid != os.geteuid():  # opening another user's file may block for ever (a pipe)
                continue
            with mark.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _unlink_shared(mark.parent)
                shutil.rmtree(mark.parent, ignore_errors=True)
