"""A disk in memory that can lose power: unsynced writes are then lost, kept in part, or torn in the middle."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.replay.journal.direct import BLOCK


@dataclass
class _File:
    data: bytearray
    synced: bytes | None = None
    """Content at the last sync; None before the first."""
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    """Writes since the last sync: offset and content."""


class MemoryDisk:
    """Implements `Disk` in memory.

    `room` limits the total size of the files, in bytes. A non-zero `fail_with` makes every write raise that errno.
    """

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.fail_with = 0
        self.syncs = 0
        self._files: dict[str, _File] = {}
        self._names: dict[str, _File] = {}
        """The files as of the last sync of the folder."""

    def names(self) -> list[str]:
        return sorted(self._files)

    def size(self, name: str) -> int:
        return len(self._files[name].data)

    def create(self, name: str, nbytes: int) -> None:
        used = sum(len(file.data) for file in self._files.values())
        if self.room is not None and used + nbytes > self.room:
            raise OSError(errno.ENOSPC, "no space left on device")
        self._files[name] = _File(bytearray(nbytes))

    def write(self, name: str, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        if self.fail_with:
            raise OSError(self.fail_with, "planned failure")
        file, content = self._files[name], b"".join(buffers)
        content += bytes(-(offset + len(content)) % BLOCK)  # The real disk may pad writes to whole blocks.
        if len(file.data) < offset + len(content):
            file.data.extend(bytes(offset + len(content) - len(file.data)))
        file.data[offset : offset + len(content)] = content
        file.writes.append((offset, content))

    def put(self, name: str, content: bytes) -> None:
        if self.fail_with:
            raise OSError(self.fail_with, "planned failure")
        self._files[name] = _File(bytearray(content), content)
        self._names[name] = self._files[name]

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        return bytes(self._files[name].data[offset : offset + nbytes])

    def sync(self, name: str) -> None:
        self.syncs += 1
        file = self._files[name]
        file.synced, file.writes = bytes(file.data), []

    def sync_folder(self) -> None:
        self._names = dict(self._files)

    def rename(self, old: str, new: str) -> None:
        self._files[new] = self._files.pop(old)

    def remove(self, name: str) -> None:
        del self._files[name]

    def truncate(self, name: str, nbytes: int) -> None:
        del self._files[name].data[nbytes:]

    def close(self) -> None:
        """Do nothing: no file is open."""

    def flip(self, name: str, offset: int, bit: int = 0) -> None:
        self._files[name].data[offset] ^= 1 << bit

    def copy(self) -> MemoryDisk:
        """Return the disk as a killed process leaves it: the machine goes on, and every write is there."""
        after = MemoryDisk(self.room)
        after._files = {name: _File(bytearray(file.data), bytes(file.data)) for name, file in list(self._files.items())}
        after._names = dict(after._files)
        return after

    def power_loss(self, random: random.Random | None = None) -> MemoryDisk:
        """Return the disk as a machine finds it after a power loss now. Any leading part of each unsynced write may be
        there; without `random`, nothing of it is."""
        after = MemoryDisk(self.room)
        for name, file in self._names.items():
            data = bytearray(file.synced if file.synced is not None else bytes(len(file.data)))
            for offset, content in file.writes:
                kept = content[: random.choice((0, random.randint(0, len(content)), len(content))) if random else 0]
                if len(data) < offset + len(kept):
                    data.extend(bytes(offset + len(kept) - len(data)))
                data[offset : offset + len(kept)] = kept
            after._files[name] = _File(data, bytes(data))
        after._names = dict(after._files)
        return after
