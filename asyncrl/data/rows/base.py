"""The interface of all row formats. A row is a dict of plain Python values by column name."""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import DataError

Row = dict[str, Any]


class Rows(ABC):
    """Rows by number, from 0. Memory use grows with the number of rows, not with the length of their text."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> Row:
        """The whole row, as plain Python values. Raises DataError naming the row."""

    @abstractmethod
    def where(self, row: int) -> str:
        """Describe the location of the row for a person."""

    @abstractmethod
    def scan(self, columns: Sequence[str]) -> Iterator[Row]:
        """Iterate over all rows in order, with at least these columns, and others only if they cost nothing."""

    def sizes(self, column: str) -> NDArray[np.int64]:
        """The approximate length of the text in this column, [rows]. Good for finding the longest, not for counting."""
        lengths = (text_length(row.get(column)) for row in self.scan([column]))
        return np.fromiter(lengths, np.int64, count=len(self))

    def close(self) -> None:  # noqa: B027, most formats hold nothing open
        """Close what reading the rows has opened."""


SCALARS = (str, int, float, bool, bytes, type(None))


def plain(value: Any) -> Any:
    """Convert to plain Python types, so that no array, numpy number or date reaches a reward.

    Raises:
        TypeError: a value cannot be converted.
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
    for kind in (str, int, float, bytes):  # subclasses of the scalar types
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{value!r:.80} is a {type(value).__name__}. Use text, numbers, and lists and dicts of these")


def text_length(value: Any) -> int:
    """Number of characters in a text or, for messages, in all of their texts."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(text_length, value.values()))
    return sum(map(text_length, value)) if isinstance(value, list | tuple) else 0


class Joined(Rows):
    """Several `Rows`, concatenated."""

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
