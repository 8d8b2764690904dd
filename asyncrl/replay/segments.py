"""Records in segment files: framing, checksums, and where the valid part of a segment ends.

    segment file  `00000042.seg`: preallocated; records from its start, each at a multiple of 8
    record        magic | u32 body bytes | u32 segment | u32 0 | u64 synced | u64 checksum | body | padding

A position is `segment << 36 | offset`, so positions grow with time. A record names its own segment: what an earlier use
of the same file left behind belongs to another and is never read. `synced` is the position up to which all was durable
when the record was written: a bad record below it was damaged, one above it was never finished.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from asyncrl.errors import JournalError
from asyncrl.replay.disk import Bytes, Disk

OFFSET_BITS = 36
MAGIC = b"aRJ\x01"
HEADER = struct.Struct("<4sIIIQQ")
ALIGN = 8
MAX_BODY = (1 << 32) - 1
REPAIR = (
    "Restore the file from a copy; or move the journal folder away and resume from the checkpoint, which makes the "
    "groups after it anew"
)
_NAME = re.compile(r"(\d{8})\.seg")


@dataclass(frozen=True, slots=True)
class Record:
    position: int
    """Of its first byte; what a snapshot points to."""
    end: int
    """Position after it: durable once everything before `end` is synced."""
    synced: int
    body: memoryview
    """Empty: only a mark of how far all was durable."""


def position_of(segment: int, offset: int) -> int:
    return segment << OFFSET_BITS | offset


def segment_of(position: int) -> int:
    return position >> OFFSET_BITS


def offset_of(position: int) -> int:
    return position & ((1 << OFFSET_BITS) - 1)


def segment_name(number: int) -> str:
    return f"{number:08d}.seg"


def segment_numbers(disk: Disk) -> list[int]:
    return sorted(int(found.group(1)) for name in disk.names() if (found := _NAME.fullmatch(name)))


def record_size(body_bytes: int) -> int:
    """Bytes of a record in the file, padding included."""
    return (HEADER.size + body_bytes + ALIGN - 1) // ALIGN * ALIGN


def frame_record(position: int, synced: int, body: Sequence[Bytes]) -> list[Bytes]:
    """The pieces of one record, to be written at `position`.

    Raises:
        JournalError: it is larger than a record can be.
    """
    size = sum(len(piece) for piece in body)
    if size > MAX_BODY:
        raise JournalError(f"a record of {size} bytes is over the limit of {MAX_BODY}")
    checksum = _checksum(position, size, synced, body)
    header = HEADER.pack(MAGIC, size, segment_of(position), 0, synced, checksum)
    return [header, *body, bytes(record_size(size) - HEADER.size - size)]


def _checksum(position: int, size: int, synced: int, body: Sequence[Bytes]) -> int:
    # The place is part of it: a record that shows up elsewhere in the file is none.
    digest = xxhash.xxh3_64(struct.pack("<QQQ", position, size, synced))
    for piece in body:
        digest.update(piece)
    return digest.intdigest()


def read_record(data: memoryview, segment: int, offset: int) -> Record | None:
    """The record at `offset` of the file content `data`; None where there is no valid one of this segment."""
    if offset + HEADER.size > len(data):
        return None
    magic, size, number, _, synced, checksum = HEADER.unpack_from(data, offset)
    end = offset + record_size(size)
    if magic != MAGIC or number != segment or offset + HEADER.size + size > len(data):
        return None
    body = data[offset + HEADER.size : offset + HEADER.size + size]
    position = position_of(segment, offset)
    if checksum != _checksum(position, size, synced, [body]):
        return None
    return Record(position, position_of(segment, end), synced, body)


def read_at(disk: Disk, position: int) -> Record | None:
    """One record, read from the file; None when it is not there."""
    name, offset = segment_name(segment_of(position)), offset_of(position)
    header = disk.read(name, offset, HEADER.size)
    if len(header) < HEADER.size:
        return None
    size = HEADER.unpack(header)[1]
    if HEADER.size + size > disk.size(name) - offset:
        return None
    data = memoryview(disk.read(name, offset, HEADER.size + size))
    magic, _, number, _, synced, checksum = HEADER.unpack_from(data, 0)
    body = data[HEADER.size :]
    if magic != MAGIC or number != segment_of(position) or checksum != _checksum(position, size, synced, [body]):
        return None
    return Record(position, position + record_size(size), synced, body)


def scan(disk: Disk, segment: int, end: int | None = None) -> Iterator[Record]:
    """The records of a segment in order, up to the position `end` or, without one, to the last valid record.

    Raises:
        JournalError: what follows the last valid record was durable once, so it was damaged since.
    """
    name = segment_name(segment)
    data = memoryview(disk.read(name, 0, disk.size(name)))
    offset = 0
    stop = len(data) if end is None else offset_of(end)
    while offset < stop:
        record = read_record(data, segment, offset)
        if record is None:
            break
        yield record
        offset = offset_of(record.end)
    if end is not None and offset != stop:
        raise _damaged(name, offset, f"the segment after it says that this one ends at {stop}")
    if end is None:
        _refuse_damage(data, segment, offset)


def _refuse_damage(data: memoryview, segment: int, offset: int) -> None:
    """An unfinished tail may hold anything, whole records too; none that saw this offset durable, though."""
    content = data.obj if isinstance(data.obj, bytes) else bytes(data)
    found = content.find(MAGIC, offset)
    while found >= 0:
        record = read_record(data, segment, found) if found % ALIGN == 0 else None
        if record is not None and record.synced > position_of(segment, offset):
            raise _damaged(segment_name(segment), offset, f"a record at byte {found} saw it durable")
        found = content.find(MAGIC, found + 1)


def _damaged(name: str, offset: int, proof: str) -> JournalError:
    return JournalError(f"the journal file {name} is damaged at byte {offset}: {proof}. {REPAIR}")
