"""What every format of rows offers, and what a row is: plain Python values by the name of their column."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from typing import Any, Protocol
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import DataError

Row = dict[str, Any]


class Rows(Protocol):
    """Rows by number, from 0. What is held in memory grows with the number of rows, not with their text."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Row:
        """The whole row, of plain Python values. Raises DataError naming it."""
        ...

    def where(self, row: int) -> str:
        """The row in words that lead a person to it."""
        ...

    def scan(self, columns: Sequence[str]) -> Iterator[Row]:
        """All rows in order, with at least these of their columns; other columns are read only where they come for
        nothing."""
        ...

    def sizes(self, column: str) -> NDArray[np.int64]:
        """About how long the text in this column is, [rows]: to find the longest, not to count."""
        ...

    def close(self) -> None: ...


SCALARS = (str, int, float, bool, bytes, type(None))


def plain(value: Any) -> Any:
    """The same of plain Python types: what reaches a reward is never an array, a number of numpy or a date.

    Raises:
        TypeError: it is something else.
    """
    if type(value) in SCALARS:
        return value
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {name if isinstance(name, int) else str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Enum):
        return plain(value.value)
    kind: Any
    for kind in (str, int, float, bytes):  # of a subclass
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{value!r:.80} is a {type(value).__name__}. Give text, numbers, lists and dicts of them")


def text_length(value: Any) -> int:
    """Characters in it, of messages all of them."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(text_length, value.values()))
    return sum(map(text_length, value)) if isinstance(value, list | tuple) else 0


def measured(rows: Rows, column: str) -> NDArray[np.int64]:
    """`Rows.sizes` where the format knows nothing better than to look."""
    lengths = (text_length(row.get(column)) for row in rows.scan([column]))
    return np.fromiter(lengths, np.int64, count=len(rows))


class Joined:
    """Several of them, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int) -> Row:
        part, inside = self._find(row)
        return part[inside]

    def where(self, row: int) -> str:
        part, inside = self._find(row)
        return part.where(inside)

    def scan(self, columns: Sequence[str]) -> Iterator[Row]:
        for part in self.parts:
            yield from part.scan(columns)

    def sizes(self, column: str) -> NDArray[np.int64]:
        return np.concatenate([part.sizes(column) for part in self.parts])

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def _find(self, row: int) -> tuple[Rows, int]:
        number = int(np.searchsorted(self._ends, row, side="right"))
        part = self.parts[number]
        return part, row - int(self._ends[number]) + len(part)


def joined(parts: Sequence[Rows]) -> Rows:
    return parts[0] if len(parts) == 1 else Joined(parts)


def no_rows(what: str) -> DataError:
    return DataError(f"{what} has no rows. Give one with a `prompt` per row")
