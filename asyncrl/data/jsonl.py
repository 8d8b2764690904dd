"""JSONL prompt files: indexed at once, parsed row by row.

A row is an object with `prompt` (text, or a list of chat messages) and any other columns, which reach the reward
function untouched; verl's columns (`data_source`, `reward_model`, `extra_info`) are read as they are.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from asyncrl.errors import DataError

Row = dict[str, Any]


class JsonlFile:
    """Rows of a JSONL file by number, from 0; blank lines are no rows. Holds line offsets, never the text.

    Raises:
        DataError: the file is missing, empty, or its first row cannot be used.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._offsets, self._lines = _index(self.path)
        # One handle per file, never per row: a worker reads hundreds of rows a second.
        self._file = self.path.open("rb")
        self[0]

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> Row:
        """Raises DataError naming file and line when the row is not JSON or has no usable `prompt`."""
        self._file.seek(self._offsets[row])
        return parse_row(self._file.readline(), self.where(row))

    def where(self, row: int) -> str:
        """`file:line`, as editors count lines."""
        return f"{self.path}:{self._lines[row]}"

    def check(self) -> None:
        """Parse every row, so that a bad one is found before anything is started.

        Raises:
            DataError: naming the first bad row.
        """
        for row in range(len(self)):
            self[row]

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
        raise DataError(f"{path} has no rows. Write one JSON object with a `prompt` per line")
    return offsets, lines


def parse_row(line: bytes, where: str) -> Row:
    """One checked row; `where` names it in errors. Raises DataError."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not valid JSON ({error}). Each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise DataError(f'{where} holds a {type(row).__name__}. Each line must be an object like {{"prompt": "..."}}')
    if "prompt" not in row:
        known = ", ".join(sorted(row)) or "none"
        raise DataError(f"{where} has no column `prompt` (columns: {known}). Rename the column that holds the prompt")
    _check_prompt(row["prompt"], where)
    return row


def _check_prompt(prompt: object, where: str) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{where}: `prompt` is empty. Remove the row")
        return
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: `prompt` must be text or a non-empty list of messages, got {prompt!r:.80}")
    for message in prompt:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
            raise DataError(f"{where}: a message needs `role` and `content`, got {message!r:.80}")
