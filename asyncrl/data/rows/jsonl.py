"""JSONL files: one JSON object per line, indexed at once, parsed row by row."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncrl.data.rows.base import Row, no_rows
from asyncrl.errors import DataError


class JsonlFile:
    """Blank lines are no rows. Holds line offsets, never the text.

    Raises:
        DataError: the file is missing or empty.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._offsets, self._lines = _index(self.path)
        # One handle per file, never per row: a worker reads hundreds of rows a second.
        self._file = self.path.open("rb")
        self._indexed = self._stamp()

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> Row:
        """Raises DataError naming file and line when the row is no JSON object."""
        self._file.seek(self._offsets[row])
        return _parse(self._file.readline(), self, row)

    def changed(self) -> str:
        """What to say of a line that cannot be read, where somebody wrote into the file since it was opened."""
        return "" if self._stamp() == self._indexed else ". The file was changed while it is in use: give a run a copy"

    def _stamp(self) -> tuple[int, int]:
        stat = os.fstat(self._file.fileno())
        return stat.st_size, stat.st_mtime_ns

    def where(self, row: int) -> str:
        """`file:line`, as editors count lines."""
        return f"{self.path}:{self._lines[row]}"

    def scan(self, columns: Sequence[str]) -> Iterator[Row]:
        """Whole rows: a line is parsed or it is not."""
        with self.path.open("rb") as file:  # another handle: a row may be asked for in between
            for row, line in enumerate(line for line in file if line.strip()):
                yield _parse(line, self, row)

    def sizes(self, column: str) -> NDArray[np.int64]:
        """Bytes of the lines."""
        offsets = np.frombuffer(self._offsets, np.int64)
        # Blank lines count for the row before them: no harm, they are few.
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
