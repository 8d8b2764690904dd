"""JSON lines, plain, or chained by checksums, as those of the ledger are: each ends with a checksum over itself and the
checksum of the line before.

    {"step": 7, "policy_version": 9, ..., "crc": "5d41402a"}

In a chain a changed line is detected, and so is one whose predecessor is missing. Lines cut off at the end of the file
are not: the reader has to know from elsewhere where the file should end.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from asyncrl.storage.full_disk import append_whole, disk_space

log = logging.getLogger(__name__)

Row = dict[str, Any]

_END = re.compile(rb', "crc": "([0-9a-f]{8})"\}\n\Z')
_ZEROS, _LONG = bytes.maketrans(b"123456789", b"0" * 9), b"0" * 309
"""Any number with fewer digits fits into a float. Checking each number of a line would take as long as parsing it."""
TAIL_BYTES = 4 << 20
"""Bytes read from the end of a file to find its last line."""


def chained(text: str, before: int) -> tuple[str, int]:
    """The line for the JSON object `text`, and its checksum. `before` is the previous line's, 0 for the first line."""
    body = text[:-1]
    crc = zlib.crc32(body.encode(), before)
    return f'{body}, "crc": "{crc:08x}"}}\n', crc


def checksum_of(line: bytes, before: int | None) -> int | None:
    """Checksum of a complete line; None if it does not match the line. `before`: the previous line's; None for any."""
    found = _END.search(line)
    if found is None:
        return None
    said = int(found.group(1), 16)
    return said if before is None or zlib.crc32(line[: found.start()], before) == said else None


Part = TypeVar("Part")


@dataclass(slots=True)
class Lines(Generic[Part]):
    """The content of a file."""

    rows: list[Part] = field(default_factory=list)
    """The requested part of each readable row, without checksum."""
    ends: list[int] = field(default_factory=list)
    """Byte offset of the end of each row."""
    damaged: list[int] = field(default_factory=list)
    """Numbers, from 1, of lines of a chain that were changed, or whose predecessor is missing."""
    unread: int = 0
    """Number of lines that are not JSON objects."""

    def problem(self, path: Path) -> str:
        """Describe the damage; empty if there is none."""
        if not self.damaged:
            return ""
        more = f" and {len(self.damaged) - 3} more" * (len(self.damaged) > 3)
        which = ", ".join(map(str, self.damaged[:3]))
        return f"{path}: line {which}{more} was changed after it was written, or the line before it is gone"


def read_lines(path: Path) -> Lines[Row]:
    """Read all readable rows of the file; none if it does not exist. Raises OSError."""
    return read_parts(path, lambda row: row)


def read_parts(path: Path, part: Callable[[Row], Part], *, chained: bool = False) -> Lines[Part]:
    """As `read_lines`, keeping only a `part` of each row, because all may not fit into memory. Raises OSError.

    Args:
        chained: verify the checksums.
    """
    found = Lines[Part]()
    end, before = 0, 0
    for number, line in enumerate(_lines_of(path), start=1):
        end += len(line)
        if not line.endswith(b"\n"):  # a killed writer may leave the last one so
            break
        row = row_of(line)
        found.unread += row is None
        if chained:
            crc = checksum_of(line, before)
            if crc is None or row is None:
                found.damaged.append(number)
                crc = checksum_of(line, None)
            before = before if crc is None else crc
        if row is not None:
            found.rows.append(part(row))
            found.ends.append(end)
    return found


def rows_in(path: Path) -> Iterator[Row]:
    """Iterate over the rows of `read_lines`. Raises OSError."""
    whole = (line for line in _lines_of(path) if line.endswith(b"\n"))
    return (row for row in map(row_of, whole) if row is not None)


def _lines_of(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as file:
            yield from file


def row_of(line: bytes) -> Row | None:
    """The row without its checksum; None if the line is not a JSON object. An integer too large for a float becomes
    infinity, as JSON's 1e999 does; arithmetic with it would raise OverflowError."""
    try:
        row = json.loads(line, parse_int=_whole) if _LONG in line.translate(_ZEROS) else json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    row.pop("crc", None)
    return row


def _whole(digits: str) -> float:
    return int(digits) if math.isfinite(float(digits)) else float(digits)


def tail(path: Path, size: int = TAIL_BYTES) -> list[bytes]:
    """The last lines of the file, the first of them possibly incomplete; none if there is no file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().splitlines(keepends=True)


def last_checksum(path: Path) -> int:
    """Checksum of the last complete line; 0 if there is none."""
    return next((crc for line in reversed(tail(path)) if (crc := checksum_of(line, None)) is not None), 0)


class LineFile:
    """Appends objects to a file, all of a call or none."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, rows: Iterable[Mapping[str, Any]], **options: Any) -> None:
        """Append rows; `options` are passed to `json.dumps`. Raises DiskFullError, OSError."""
        self._add("".join(f"{json.dumps(row, **options)}\n" for row in rows))

    def _add(self, text: str) -> None:
        content = text.encode()
        if content:
            with disk_space(self._path, len(content)):
                append_whole(self._path, content)


class ChainedLineFile(LineFile):
    """The same, chained by checksums to the lines that the file has."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._crc = last_checksum(path)

    def append(self, rows: Iterable[Mapping[str, Any]], **options: Any) -> None:
        crc, lines = self._crc, []
        for row in rows:
            line, crc = chained(json.dumps(row, **options), crc)
            lines.append(line)
        self._add("".join(lines))
        self._crc = crc


def open_kept(path: Path, keep: Callable[[Row], bool]) -> LineFile:
    """Open for appending after the rows to keep, which come before all others. Raises OSError."""
    found = read_parts(path, keep)
    kept = next((place for place, is_kept in enumerate(found.rows) if not is_kept), len(found.rows))
    end = found.ends[kept - 1] if kept else 0
    if path.exists() and path.stat().st_size != end:
        os.truncate(path, end)  # in place, because a full disk has no room for a copy
    return LineFile(path)
