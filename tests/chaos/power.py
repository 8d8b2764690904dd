"""A disk whose power can fail: what was written and not synced is undone after the process was killed.

`kill -9` alone cannot test a sync, because the page cache survives it. So every write notes the bytes it replaces in a
file beside the journal, and `lose_power` puts them back, for all writes or for those after a random one, some with
flipped bits.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from asyncrl.replay.journal.disk import Bytes, FolderDisk

UNDO = "undo.jsonl"
POINTS = ("write before", "write after", "sync before", "sync after", "reply before", "reply after")


class Failpoint:
    """Kills this process the `count`-th time that it passes `place`."""

    def __init__(self, place: str, count: int) -> None:
        self.place, self.left = place, count

    def pass_by(self, place: str) -> None:
        if place == self.place:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class PowerDisk(FolderDisk):
    """A folder that logs how to undo each write. While the file `full` exists, the disk has no space left."""

    def __init__(self, folder: Path, sync_delay_s: float, failpoint: Failpoint, full: Path) -> None:
        super().__init__(folder, locked=True)
        self._delay_s, self._failpoint, self._full = sync_delay_s, failpoint, full
        self._undo = (folder.parent / UNDO).open("a")

    def _note(self, *what: object) -> None:
        self._undo.write(json.dumps(what) + "\n")
        self._undo.flush()

    def create(self, name: str, nbytes: int) -> None:
        self._refuse_if_full()
        self._note("create", name)
        super().create(name, nbytes)

    def write(self, name: str, offset: int, buffers: Sequence[Bytes]) -> None:
        self._failpoint.pass_by("write before")
        content = b"".join(buffers)
        self._note("write", name, offset, self.read(name, offset, len(content)).hex())
        if self._full.exists():
            super().write(name, offset, [content[: len(content) // 2]])  # A full disk leaves a partial write behind.
        self._refuse_if_full()
        super().write(name, offset, [content])
        self._failpoint.pass_by("write after")

    def _refuse_if_full(self) -> None:
        if self._full.exists():
            raise OSError(errno.ENOSPC, "no space left on device (planned)")

    def sync(self, name: str) -> None:
        self._failpoint.pass_by("sync before")
        time.sleep(self._delay_s)
        super().sync(name)
        self._note("sync", name)
        self._failpoint.pass_by("sync after")

    def sync_folder(self) -> None:
        super().sync_folder()
        self._note("sync_folder")

    def rename(self, old: str, new: str) -> None:
        self._note("rename", old, new)
        super().rename(old, new)


def unsynced(folder: Path) -> list[list[Any]]:
    """Return the operations on the files of a journal since they were last synced, in order."""
    path = folder.parent / UNDO
    notes = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")] if path.exists() else []
    pending: list[list[Any]] = []
    for note in notes:
        if note[0] == "sync":
            pending = [p for p in pending if not (p[0] == "write" and p[1] == note[1])]
        elif note[0] == "sync_folder":
            pending = [p for p in pending if p[0] == "write"]
        else:
            pending.append(note)
    return pending


def lose_power(folder: Path, random: Random) -> int:
    """Destroy what the dead process had not synced, and return the number of bytes lost. Sometimes a part survives."""
    pending = unsynced(folder)
    lost = 0
    survives = random.choice((0, 0, random.randint(0, len(pending))))
    for note in reversed(pending[survives:]):
        lost += _take_back(folder, note, random)
    (folder.parent / UNDO).write_text("")
    return lost


def _take_back(folder: Path, note: list, random: Random) -> int:
    if note[0] == "create":
        (folder / note[1]).unlink(missing_ok=True)
        return 0
    if note[0] == "rename":
        if (folder / note[2]).exists():
            shutil.move(folder / note[2], folder / note[1])
        return 0
    _, name, offset, before = note
    if not (folder / name).exists():
        return 0
    with (folder / name).open("r+b") as file:
        file.seek(offset)
        written = bytearray(file.read(len(before) // 2))
        cut = random.randint(0, len(written)) if random.random() < 0.3 else 0
        old = bytes.fromhex(before)
        mixed = bytes(written[:cut]) + old[cut:]
        if cut and random.random() < 0.5:
            place = random.randrange(cut)
            mixed = mixed[:place] + bytes([mixed[place] ^ (1 << random.randrange(8))]) + mixed[place + 1 :]
        file.seek(offset)
        file.write(mixed)
    return len(old) - cut
