"""Rows in Arrow format: parquet files, and folders saved by `datasets`. Needs only pyarrow, imported with this module.

Rows become Python objects one at a time. A saved dataset is memory-mapped. Of a parquet file, the row groups that were
read are kept decoded, as Arrow memory, up to a limit.

Structs have the same fields in every row: a tool call gets the arguments of all others, as nulls. They are left out
where a null has no other meaning (`rows.messages.MADE_NULLS`). Columns of the Arrow JSON type, with which `datasets`
stores objects that differ from row to row, become the objects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.data.rows.base import Row, Rows, no_rows, plain
from asyncrl.data.rows.messages import MADE_NULLS, is_message
from asyncrl.errors import DataError

KEPT_BYTES = 512 << 20
"""Limit on the decoded row groups kept per process and file. Shuffled reads from a larger file decode a group again for
nearly every row; use smaller row groups, or a folder written by `save_to_disk`."""
BATCH_ROWS = 1024
UNREADABLE = (OSError, pa.ArrowException)


class ParquetFile(Rows):
    """Raises DataError if the file cannot be read or has no rows."""

    def __init__(self, path: str | Path, kept_bytes: int = KEPT_BYTES) -> None:
        self.path = Path(path)
        try:
            self._file = pq.ParquetFile(path, memory_map=True)
        except UNREADABLE as error:
            raise _unreadable(self.path, error) from error
        counts = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
        self._ends = np.cumsum(counts, dtype=np.int64)
        if not sum(counts):
            raise no_rows(str(path))
        self._kept_bytes = kept_bytes
        self._groups: dict[int, pa.Table] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int) -> Row:
        number = int(np.searchsorted(self._ends, row, side="right"))
        table = self._group(number)
        return _row(table, row - int(self._ends[number]) + table.num_rows, self.where(row))

    def where(self, row: int) -> str:
        """`file[row]`, with rows counted as in pandas and `datasets`."""
        return f"{self.path}[{row}]"

    def scan(self, columns: Sequence[str]) -> Iterator[Row]:
        wanted = [name for name in columns if name in self._file.schema_arrow.names]
        try:
            for batch in self._file.iter_batches(BATCH_ROWS, columns=wanted):
                yield from _rows(batch, str(self.path)) if wanted else ({} for _ in range(batch.num_rows))
        except UNREADABLE as error:
            raise _unreadable(self.path, error) from error

    def close(self) -> None:
        self._groups.clear()
        self._file.close()

    def _group(self, number: int) -> pa.Table:
        table = self._groups.pop(number, None)
        if table is None:
            try:
                table = self._file.read_row_group(number)
            except UNREADABLE as error:
                raise _unreadable(self.path, error) from error
        self._groups[number] = table  # last in the order of eviction
        while len(self._groups) > 1 and sum(each.nbytes for each in self._groups.values()) > self._kept_bytes:
            del self._groups[next(iter(self._groups))]
        return table


class ArrowTable(Rows):
    """A table in memory or mapped from files, which stay mapped until the last row is garbage-collected.

    Args:
        name: used in errors.

    Raises:
        DataError: it has no rows.
    """

    def __init__(self, table: pa.Table, name: str) -> None:
        if not table.num_rows:
            raise no_rows(name)
        self._table, self._name = table, name

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, row: int) -> Row:
        return _row(self._table, row, self.where(row))

    def where(self, row: int) -> str:
        return f"{self._name}[{row}]"

    def scan(self, columns: Sequence[str]) -> Iterator[Row]:
        wanted = [name for name in columns if name in self._table.column_names]
        for batch in self._table.select(wanted).to_batches(max_chunksize=BATCH_ROWS) if wanted else ():
            yield from _rows(batch, self._name)
        if not wanted:
            yield from ({} for _ in range(len(self)))


def saved_dataset(folder: str | Path) -> ArrowTable:
    """Open a dataset written by `Dataset.save_to_disk(folder)`.

    Raises:
        DataError: one of its files is missing or damaged.
    """
    place = Path(folder)
    try:
        files = [place / each["filename"] for each in json.loads((place / "state.json").read_text())["_data_files"]]
        tables = [pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files]
        table = pa.concat_tables(tables)
    except (*UNREADABLE, ValueError, KeyError, TypeError) as error:
        raise _unreadable(place, error) from error
    return ArrowTable(table, str(place))


def _row(table: pa.Table, row: int, where: str) -> Row:
    return _rows(table.slice(row, 1), where)[0]


def _rows(columns: pa.Table | pa.RecordBatch, where: str) -> list[Row]:
    """Raises DataError if a value has no Python equivalent, such as a date after the year 9999."""
    mends = {field.name: mend for field in columns.schema if (mend := _mend(field.type, field.name in MADE_NULLS))}
    try:
        rows = [plain(row) for row in columns.to_pylist()]
        for row in rows if mends else ():
            row.update({name: mend(row[name]) for name, mend in mends.items()})
        return rows
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{where}: a value in the columns {', '.join(columns.schema.names)} cannot be read ({error}). Leave its "
            "column out, or write it as text"
        ) from error


def _mend(kind: pa.DataType, below: bool) -> Callable[[Any], Any] | None:
    """Return the function that makes of a Python value what was written; None if nothing changes.

    Args:
        below: whether null fields of structs were made by Arrow.
    """
    if isinstance(kind, pa.JsonType):
        return _of_json
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        mend = _mend(kind.value_type, below)
        return None if mend is None else partial(_each, mend)
    if not pa.types.is_struct(kind):
        return None
    fields = [kind.field(place) for place in range(kind.num_fields)]
    below = below or is_message({field.name for field in fields})
    mends = {each.name: mend for each in fields if (mend := _mend(each.type, below or each.name in MADE_NULLS))}
    if not below and not mends:
        return None

    def mended(value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        given = {name: part for name, part in value.items() if part is not None} if below else value
        return {name: mends[name](part) if name in mends else part for name, part in given.items()}

    return mended


def _each(mend: Callable[[Any], Any], values: list[Any] | None) -> list[Any] | None:
    return None if values is None else [mend(value) for value in values]


def _of_json(value: str | None) -> Any:
    """Raises ValueError: the text is not JSON."""
    return None if value is None else json.loads(value)


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"cannot read {path}: {' '.join(str(error).split()):.300}. Write it again, or give another file")
