"""JSONL files: one JSON object per line. Lines are indexed when the file is opened and parsed when a row is read."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncrl.data.rows.base import Row, Rows, no_rows
from asyncrl.errors import DataError


class JsonlFile(Rows):
    """Blank lines are not rows. Keeps the offsets of lines in memory, not the text.

    Raises:
        DataError: the file is missing or empty.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._offsets, self._lines = _index(self.path)
        # One handle per file, not per row: a worker reads hundreds of rows a second.
        self._file = self.path.open("rb")
        self._indexed = self._stamp()

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> Row:
        """Raises DataError naming file and line if the row is not a JSON object."""
        self._file.seek(self._offsets[row])
        return _parse(self._file.readline(), self, row)

    def changed(self) -> str:
        """Text for the error about an unreadable line if the file was modified since it was opened; else empty."""
        own = ". The file was changed while it was in use: give the run a copy of its own"
        return "" if self._stamp() == self._indexed else own

    def _stamp(self) -> tuple[int, int]:
        stat = os.fstat(self._file.fileno())
        return stat.st_size, stat.st_mtime_ns

    def where(self, row: int) -> str:
        """`file:line`, as editors count lines."""
        return f"{self.path}:{self._lines[row]}"

    def scan(self, columns: Sequence[str]) -> Iterator[Row]:
        """Yields whole rows, since a line can only be parsed as a whole."""
        with self.path.open("rb") as file:  # a separate handle: a row may be read during the scan
            for row, line in enumerate(line for line in file if line.strip()):
                yield _parse(line, self, row)

    def sizes(self, column: str) -> NDArray[np.int64]:
        """Lengths of the lines in bytes."""
        offsets = np.frombuffer(self._offsets, np.int64)
        # Blank lines count for the row before them, which is harmless because they are few.
        return np.diff(offsets, append=self.path.stat().st_size)

    def close(self) -> None:
        self._file.close()


def _index(path: Path) -> tuple[array[int], array[int]]:
    """Byte offset and line number of every non-blank line."""
    offsets, lines = array("q"), array("q")
    position = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    offsets.append(position)
                    lines.append(number)
                position += len(line)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}. Give an existing JSONL file in `data.path`") from error
    if not offsets:
        raise no_rows(str(path))
    return offsets, lines


def _parse(line: bytes, file: JsonlFile, row: int) -> Row:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file.where(row)} is not valid JSON ({error}). Each line must be one JSON object{file.changed()}"
        ) from error
    if not isinstance(parsed, dict):
        raise DataError(
            f'{file.where(row)} holds a {type(parsed).__name__}. Each line must be an object like {{"prompt": "..."}}'
        )
    return parsed
