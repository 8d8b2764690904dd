"""JSON lines that vouch for each other: each ends with a checksum of itself and of the checksum before it.

    {"step": 7, "policy_version": 9, ..., "crc": "5d41402a"}

It stays one plain JSON object per line. A line that was changed, and one whose predecessor is gone, is found; what was
cut off at the end of the file is not: whoever reads it has to know from elsewhere how far it went.
"""

from __future__ import annotations

import itertools
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

from asyncrl.storage.full_disk import Patience, append_whole

log = logging.getLogger(__name__)

Row = dict[str, Any]

_END = re.compile(rb', "crc": "([0-9a-f]{8})"\}\n\Z')
_ZEROS, _LONG = bytes.maketrans(b"123456789", b"0" * 9), b"0" * 309
"""A number of fewer digits is one that a float holds; to look at each number of a line takes as long as to read it."""
TAIL_BYTES = 4 << 20
"""Read from the end of a file, to find its last line."""

AT_ONCE = 16
"""Rows that are copied together."""


def chained(text: str, before: int) -> tuple[str, int]:
    """The line of the JSON object `text`, and its checksum; `before` is that of the line before, 0 for the first."""
    body = text[:-1]
    crc = zlib.crc32(body.encode(), before)
    return f'{body}, "crc": "{crc:08x}"}}\n', crc


def checksum_of(line: bytes, before: int | None) -> int | None:
    """Of a whole line as it stands; None where it is not what the line says. `before`: None for any."""
    found = _END.search(line)
    if found is None:
        return None
    said = int(found.group(1), 16)
    return said if before is None or zlib.crc32(line[: found.start()], before) == said else None


Part = TypeVar("Part")


@dataclass(slots=True)
class Lines(Generic[Part]):
    """A file as it was found."""

    rows: list[Part] = field(default_factory=list)
    """Of what can be read, without the checksums, the part that was asked for."""
    ends: list[int] = field(default_factory=list)
    """Byte after each row."""
    damaged: list[int] = field(default_factory=list)
    """Numbers, from 1, of lines that are not what was written, or follow one that is gone."""
    unread: int = 0
    """Lines that are no JSON object."""
    cut_off: bool = False
    """The file ends in the middle of a line, as a killed writer may leave it."""
    crc: int = 0
    """Of the last row."""

    def problem(self, path: Path) -> str:
        """In words; empty where nothing is wrong."""
        if not self.damaged:
            return ""
        more = f" and {len(self.damaged) - 3} more" * (len(self.damaged) > 3)
        which = ", ".join(map(str, self.damaged[:3]))
        return f"{path}: line {which}{more} was changed after it was written, or the line before it is gone"


def read_lines(path: Path) -> Lines[Row]:
    """All that can be read of the file; nothing where there is none. Raises OSError."""
    return read_parts(path, lambda row: row)


def read_parts(path: Path, part: Callable[[Row], Part]) -> Lines[Part]:
    """The same of a `part` of each row: samples of a long run are more than memory holds. Raises OSError."""
    found = Lines[Part]()
    end, before = 0, 0
    for number, line in enumerate(_lines_of(path), start=1):
        end += len(line)
        if not line.endswith(b"\n"):
            found.cut_off = True
            break
        crc = checksum_of(line, before)
        row = row_of(line)
        if crc is None or row is None:
            found.damaged.append(number)
            found.unread += row is None
            crc = checksum_of(line, None)
        before = before if crc is None else crc
        if row is not None:
            found.rows.append(part(row))
            found.ends.append(end)
    found.crc = before
    return found


def rows_in(path: Path) -> Iterator[Row]:
    """Those of `read_lines`, one after the other. Raises OSError."""
    whole = (line for line in _lines_of(path) if line.endswith(b"\n"))
    return (row for row in map(row_of, whole) if row is not None)


def _lines_of(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as file:
            yield from file


def row_of(line: bytes) -> Row | None:
    """Without its checksum; None for what is no JSON object. A whole number that no float holds is infinity, as JSON's
    1e999 is read: who calculates with it would be stopped by an OverflowError."""
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
    """The last lines of the file, the first of them perhaps in part; none where there is no file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().splitlines(keepends=True)


def last_checksum(path: Path) -> int:
    """Of the last whole line; 0 where there is none."""
    return next((crc for line in reversed(tail(path)) if (crc := checksum_of(line, None)) is not None), 0)


class LineFile:
    """Appends objects, each whole or not at all. On a full disk an append waits; see `Patience`."""

    def __init__(self, path: Path, patience: Patience, crc: int = 0) -> None:
        self._path, self._patience, self._crc = path, patience, crc

    def append(self, rows: Iterable[Mapping[str, Any]], **options: Any) -> None:
        """`options` are those of `json.dumps`. Raises DiskFullError, OSError."""
        crc, lines = self._crc, []
        for row in rows:
            line, crc = chained(json.dumps(row, **options), crc)
            lines.append(line)
        content = "".join(lines).encode()
        if content:
            self._patience.through(self._path, len(content), lambda: append_whole(self._path, content))
            self._crc = crc


def open_kept(path: Path, keep: Callable[[Row], bool], patience: Patience) -> LineFile:
    """For appending to the rows that are kept, which come before all others. What is damaged is told, and put aside.

    Raises:
        DiskFullError, OSError.
    """
    found = read_parts(path, keep)
    kept = next((place for place, is_kept in enumerate(found.rows) if not is_kept), len(found.rows))
    if not found.damaged:
        end = found.ends[kept - 1] if kept else 0
        if path.exists() and path.stat().st_size != end:
            os.truncate(path, end)  # in place: a full disk has no room for a copy
        return LineFile(path, patience, last_checksum(path))
    aside = path.with_name(f"{path.name}.damaged")
    log.warning("%s. What can be read is kept, the file as it was is %s", found.problem(path), aside.name)
    fresh = path.with_name(f"{path.name}.tmp")
    fresh.unlink(missing_ok=True)
    lines = LineFile(fresh, patience)
    fresh.touch()
    rest = filter(keep, rows_in(path))
    while some := list(itertools.islice(rest, AT_ONCE)):
        lines.append(some)
    path.replace(aside)
    fresh.replace(path)
    return LineFile(path, patience, last_checksum(path))
