"""The rows of one source as prompts are drawn from them: filtered, numbered, with a checked `prompt`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.checks.conditions import Condition
from asyncrl.checks.hints import nearest
from asyncrl.checks.sources import Source
from asyncrl.data.rows.base import Row, Rows
from asyncrl.data.rows.messages import (
    MEDIA,
    OPTIONS,
    TOOLS,
    from_json_text,
    messages_of,
    refuse_halves,
    refuse_media,
    refuse_options,
    tools_of,
)
from asyncrl.errors import DataError

PROMPT = "prompt"
DATA_SOURCE = "data_source"


class SourceRows(Rows):
    """The rows that pass `source.where`, numbered from 0.

    Raises:
        DataError: no row passes `where`.
    """

    def __init__(self, source: Source, rows: Rows) -> None:
        self.source, self._rows = source, rows
        self._kept = matching(rows, source.where) if source.where else np.arange(len(rows))

    @property
    def unfiltered(self) -> int:
        """Number of rows before filtering."""
        return len(self._rows)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, row: int) -> Row:
        """Raises DataError naming the row if it cannot be read."""
        return self._rows[int(self._kept[row])]

    def where(self, row: int) -> str:
        return self._rows.where(int(self._kept[row]))

    def scan(self, columns: Sequence[str]) -> Iterator[Row]:
        kept = np.zeros(len(self._rows), bool)
        kept[self._kept] = True
        return (row for row, wanted in zip(self._rows.scan(columns), kept, strict=True) if wanted)

    def data_sources(self) -> Iterator[str]:
        """Each row's data source, in order; empty if it has none. Raises DataError for a row that cannot be read."""
        return (str(self._data_source(columns) or "") for columns in self.scan([DATA_SOURCE]))

    def _data_source(self, columns: Row) -> Any:
        """The row's own data source, else the name of the source in the mixture."""
        own = columns.get(DATA_SOURCE)
        return own if own is not None else self.source.name or None

    def sizes(self, column: str) -> NDArray[np.int64]:
        return self._rows.sizes(column)[self._kept]

    def close(self) -> None:
        self._rows.close()

    def ranks(self, column: str) -> NDArray[np.int64]:
        """The rank of each row's value in this column among all distinct values, [rows]. Equal values share a rank.

        Raises:
            DataError: a row has neither a number nor text in this column, or some rows have numbers and some text.
        """
        values: list[Any] = []
        for row, columns in enumerate(self.scan([column.partition(".")[0]])):
            value = dug(columns, column.split("."))
            kinds = (str,) if values and isinstance(values[0], str) else (int, float) if values else (str, int, float)
            if not isinstance(value, kinds) or value != value:
                known = sorted(self._rows[int(self._kept[row])])
                got = (
                    f"got {value!r:.80}" if value is not None else f"it has {', '.join(known)}.{nearest(column, known)}"
                )
                raise DataError(
                    f"{self.where(row)}: data.order_by={column} needs a number in every row, or text in every row; "
                    f"{got.rstrip('.')}. Fix the row, leave it out with data.where, or order by another column"
                )
            values.append(value)
        return np.unique(np.asarray(values), return_inverse=True)[1].reshape(-1)


class PromptRows(SourceRows):
    """Rows with a checked `prompt`, and in a mixture with a `data_source`.

    Raises:
        DataError: the first row has no usable prompt, or no row passes `where`.
    """

    def __init__(self, source: Source, rows: Rows) -> None:
        super().__init__(source, rows)
        self[0]

    def __getitem__(self, row: int) -> Row:
        """Raises DataError naming the row if it has no usable prompt."""
        found = super().__getitem__(row)
        found[PROMPT] = self._checked(found, row)
        if (name := self._data_source(found)) is not None:
            found[DATA_SOURCE] = name
        return found

    def sizes(self, column: str = PROMPT) -> NDArray[np.int64]:
        return super().sizes(self.source.prompt_column if column == PROMPT else column)

    def check(self) -> dict[str, str]:
        """Check every row, so that a bad one is found before anything is started.

        Returns:
            Each `data_source` (empty for rows that have none) with the first row that has it.

        Raises:
            DataError: naming the first bad row, or the first whose prompt is not of the same kind as the others.
        """
        first = type(self[0][PROMPT])
        found: dict[str, str] = {}
        for row, columns in enumerate(self.scan([self.source.prompt_column, DATA_SOURCE, TOOLS, OPTIONS, *MEDIA])):
            refuse_media(columns, self.where(row))
            prompt = self._checked(columns, row)
            if not isinstance(prompt, str):
                refuse_options(columns, self.where(row))
            if type(prompt) is not first:
                kinds = {str: "text", list: "a list of messages"}
                raise DataError(
                    f"{self.where(row)}: the prompt is {kinds[type(prompt)]}, and that of {self.where(0)} is "
                    f"{kinds[first]}. Write all prompts of {self.source.title} in one form"
                )
            name = str(self._data_source(columns) or "")
            if name not in found:
                found[name] = self.where(row)
        return found

    def _checked(self, columns: Row, row: int) -> str | list[dict[str, Any]]:
        name = self.source.prompt_column
        if name not in columns:
            known = ", ".join(sorted(columns if len(columns) > 1 else self._rows[int(self._kept[row])])) or "none"
            raise DataError(
                f"{self.where(row)} has no column `{name}` (columns: {known}). Name the column that holds the prompt: "
                "data.prompt_column=COLUMN"
            )
        prompt = checked_prompt(columns[name], name, self.where(row))
        if not isinstance(prompt, str):
            tools_of(columns, self.where(row))
        return prompt


def checked_prompt(prompt: object, column: str, where: str) -> str | list[dict[str, Any]]:
    """A text, or messages whose next one the model is to write. Raises DataError naming the row."""
    prompt = from_json_text(prompt)
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{where}: `{column}` is empty. Remove the row")
        refuse_halves(prompt, column, where)
        return prompt
    messages = messages_of(prompt, column, where)
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: `{column}` ends with the assistant's answer, which the model would be shown as a turn that is "
            "over. End the prompt with what it should answer (an answer goes into a column of its own, for the reward)"
        )
    return messages


def matching(rows: Rows, where: Sequence[Condition]) -> NDArray[np.int64]:
    """Numbers of the rows for which all conditions of `where` hold, in order.

    Raises:
        DataError: there is no such row; no row has the column; or a bound is set on a value that is not a number.
    """
    kept: list[int] = []
    unseen = {condition.column for condition in where}
    for row, columns in enumerate(rows.scan(sorted({condition.column[0] for condition in where}))):
        values = [dug(columns, condition.column) for condition in where]
        unseen -= {condition.column for condition, value in zip(where, values, strict=True) if value is not None}
        try:
            if all(condition.holds(value) for condition, value in zip(where, values, strict=True)):
                kept.append(row)
        except TypeError as error:
            said = " ".join(map(str, where))
            raise DataError(f"{rows.where(row)}: {said}: {error}. List the values that the column may have") from error
    if not kept:
        said, first = " ".join(map(str, where)), rows[0]
        found = ", ".join(f"{'.'.join(c.column)}={dug(first, c.column)!r:.80}" for c in where)
        why = f"no row has a column {'.'.join(min(unseen))} (columns: {', '.join(first)})" if unseen else f"has {found}"
        raise DataError(f"{said} keeps none of the {len(rows):,} rows; {rows.where(0)}: {why}. Correct data.where")
    return np.asarray(kept, np.int64)


def dug(columns: Row, path: Sequence[str]) -> Any:
    """The value in a nested column; None if there is none."""
    value: Any = columns
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value
