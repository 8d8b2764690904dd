"""Damage a journal so that a server must refuse to start: flip one bit of a durable record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

from asyncrl.replay.journal.disk import FolderDisk
from asyncrl.replay.journal.recovery import segment_chain
from asyncrl.replay.journal.segments import offset_of, scan, segment_name


@dataclass(frozen=True, slots=True)
class Flip:
    path: Path
    place: int
    bit: int
    record: int
    """Byte offset of the damaged record, which the server has to name."""

    def turn(self) -> None:
        """Flip the bit: the first call damages the record, the second repairs it."""
        with self.path.open("r+b") as file:
            file.seek(self.place)
            byte = file.read(1)[0]
            file.seek(self.place)
            file.write(bytes([byte ^ 1 << self.bit]))


def find_flip(folder: Path, random: Random) -> Flip | None:
    """Choose a bit of a record in the newest segment that a later record names as durable.

    Returns:
        None while there is no such record.
    """
    disk = FolderDisk(folder, locked=False)
    chain = segment_chain(disk)
    if not chain:
        return None
    number = chain[-1].number
    records = list(scan(disk, number))
    durable = max(record.synced for record in records)
    known = [record for record in records if record.end <= durable and len(record.body)]
    if not known:
        return None
    record = random.choice(known)
    start = offset_of(record.position)
    padded = offset_of(record.end)
    data = disk.read(segment_name(number), start, padded - start)
    body = data.index(bytes(record.body))
    place = start + body + random.randrange(len(record.body))
    return Flip(folder / segment_name(number), place, random.randrange(8), start)
