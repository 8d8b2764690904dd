"""Reads and frames records in segment files: checksums, and where the valid part of a segment ends.

    segment file  `00000042.seg`: preallocated; records from its start, each at a multiple of 8
    record        magic | u32 body bytes | u32 segment | u32 blocks | u64 synced | u64 checksum | body | padding

A position is `segment << 36 | offset`, so positions grow with time. A record names its own segment: records left by an
earlier use of the same file name another one and are never read. `synced` is the position up to which everything was
durable when the record was written: an invalid record below it was damaged, one above it was never finished. `blocks`
is the size with which the file was created, in units of 4096 bytes: a shorter file was cut off, unless its writer
closed it, which leaves a last record without a body, whose `synced` is its own end.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from asyncrl.errors import JournalError
from asyncrl.replay.journal.disk import Bytes, Disk
from asyncrl.storage.lines import chained, checksum_of, row_of

OFFSET_BITS = 36
MAGIC = b"aRJ\x01"
HEADER = struct.Struct("<4sIIIQQ")
ALIGN = 8
BLOCK = 4096
HEAD_FILE = "head"
MAX_BODY = (1 << 32) - 1
REPAIR = (
    "Restore the file from a copy, or move the journal folder away and resume from the checkpoint, which generates "
    "the groups after it again"
)
_NAME = re.compile(r"(\d{8})\.seg")


@dataclass(frozen=True, slots=True)
class Record:
    position: int
    """Position of its first byte, to which snapshots refer."""
    end: int
    """Position after it; the record is durable once everything before `end` is synced."""
    synced: int
    body: memoryview
    """Empty in a record that only marks how far everything was durable."""
    blocks: int = 0
    """Size of the file when it was created, in blocks of 4096 bytes."""

    @property
    def closes(self) -> bool:
        return not self.body and self.synced == self.end


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


def head_text(number: int) -> bytes:
    """Return the content of `HEAD_FILE` once segment `number` is durable."""
    return chained(json.dumps({"newest_segment": number}), 0)[0].encode()


def read_head(disk: Disk) -> int | None:
    """Return the number of the newest segment recorded as durable; None if there is no record or it is unreadable."""
    if HEAD_FILE not in disk.names():
        return None
    line = disk.read(HEAD_FILE, 0, disk.size(HEAD_FILE))
    row = row_of(line) if checksum_of(line, 0) is not None else None
    return None if row is None else row["newest_segment"]


def record_size(body_bytes: int) -> int:
    """Return the size of a record in the file in bytes, including padding."""
    return (HEADER.size + body_bytes + ALIGN - 1) // ALIGN * ALIGN


def frame_record(position: int, synced: int, body: Sequence[Bytes], blocks: int = 0) -> list[Bytes]:
    """Return the pieces of one record, to be written at `position`.

    Raises:
        JournalError: the body exceeds the maximum size of a record.
    """
    size = sum(len(piece) for piece in body)
    if size > MAX_BODY:
        raise JournalError(f"a record of {size} bytes is over the limit of {MAX_BODY}")
    checksum = _checksum(position, size, blocks, synced, body)
    header = HEADER.pack(MAGIC, size, segment_of(position), blocks, synced, checksum)
    return [header, *body, bytes(record_size(size) - HEADER.size - size)]


def _checksum(position: int, size: int, blocks: int, synced: int, body: Sequence[Bytes]) -> int:
    # The position is included: a record found elsewhere in the file is invalid.
    digest = xxhash.xxh3_64(struct.pack("<QIIQ", position, size, blocks, synced))
    for piece in body:
        digest.update(piece)
    return digest.intdigest()


def read_record(data: memoryview, segment: int, offset: int, begin: int = 0) -> Record | None:
    """Return the record at `offset` of a file, whose content from `begin` on is `data`; None if there is no valid
    record of this segment."""
    at = offset - begin
    if at + HEADER.size > len(data):
        return None
    magic, size, number, blocks, synced, checksum = HEADER.unpack_from(data, at)
    if magic != MAGIC or number != segment or at + HEADER.size + size > len(data):
        return None
    body = data[at + HEADER.size : at + HEADER.size + size]
    position = position_of(segment, offset)
    if checksum != _checksum(position, size, blocks, synced, [body]):
        return None
    return Record(position, position + record_size(size), synced, body, blocks)


def read_at(disk: Disk, position: int) -> Record | None:
    """Read one record from its file; None if it is not there."""
    name, offset = segment_name(segment_of(position)), offset_of(position)
    header = disk.read(name, offset, HEADER.size)
    if len(header) < HEADER.size:
        return None
    size = HEADER.unpack(header)[1]
    if HEADER.size + size > disk.size(name) - offset:
        return None
    data = memoryview(disk.read(name, offset, HEADER.size + size))
    return read_record(data, segment_of(position), offset, offset)


def scan(disk: Disk, segment: int, end: int | None = None) -> Iterator[Record]:
    """Iterate over the records of a segment, up to the position `end` or, without it, to the last valid record.

    Raises:
        JournalError: the data after the last valid record was durable once, so it was damaged since; or the file is
            shorter than when it was created.
    """
    name = segment_name(segment)
    data = memoryview(disk.read(name, 0, disk.size(name)))
    offset = 0
    stop = len(data) if end is None else offset_of(end)
    record = last = None
    while offset < stop:
        record = read_record(data, segment, offset)
        if record is None:
            break
        yield record
        last = record
        offset = offset_of(record.end)
    if end is not None and offset != stop:
        raise damaged(position_of(segment, offset), f"according to the next segment, this one ends at byte {stop}")
    if end is None:
        _refuse_damage(data, segment, offset)
        _refuse_cut(data, segment, last)


def _refuse_damage(data: memoryview, segment: int, offset: int) -> None:
    """Raise if the data after `offset` was damaged. An unfinished tail may contain anything, even whole records, but
    none whose `synced` is beyond this offset."""
    content = data.obj if isinstance(data.obj, bytes) else bytes(data)
    found = content.find(MAGIC, offset)
    while found >= 0:
        record = read_record(data, segment, found) if found % ALIGN == 0 else None
        if record is not None and record.synced > position_of(segment, offset):
            raise damaged(position_of(segment, offset), f"the record at byte {found} shows that it was durable")
        found = content.find(MAGIC, found + 1)


def _refuse_cut(data: memoryview, segment: int, last: Record | None) -> None:
    """Raise if the file was cut off: it may have lost records, unless there is unused space before the cut."""
    if last is None or last.closes or len(data) >= last.blocks * BLOCK:
        return
    offset = offset_of(last.end)
    if len(data) - offset < HEADER.size or begun(bytes(data[offset : offset + 12]), segment):
        made = last.blocks * BLOCK
        raise damaged(last.end, f"it was created with {made} bytes but has {len(data)}: it was truncated")


def begun(begin: bytes, segment: int) -> bool:
    """Return whether a record of this segment begins with these 12 bytes, one of which may be damaged."""
    expected = MAGIC + begin[4:8] + struct.pack("<I", segment)
    changed = [place for place, (found, byte) in enumerate(zip(begin, expected, strict=False)) if found != byte]
    return len(begin) == len(expected) and len(changed) <= 1


def left_out(disk: Disk, end: int) -> bool:
    """Return whether a record was begun at the position `end`, where the valid records end: one left unfinished by a
    crash, or one damaged before any later record could show it."""
    return begun(disk.read(segment_name(segment_of(end)), offset_of(end), 12), segment_of(end))


def damaged(position: int, proof: str) -> JournalError:
    """Return the error for a file that is damaged at this position."""
    name, offset = segment_name(segment_of(position)), offset_of(position)
    return JournalError(f"the journal file {name} is damaged at byte {offset}: {proof}. {REPAIR}")
