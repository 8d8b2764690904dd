"""Passages of a JSONL file: `{"contents": "title\\ntext"}`, or `{"title": ..., "text": ...}`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from asyncrl.data.rows.base import Row
from asyncrl.data.rows.jsonl import JsonlFile
from asyncrl.errors import DataError

NEEDS_BM25 = "a retriever of a corpus needs the package bm25s"


class Corpus:
    """Kept on disk; only the start of each line is in memory. May be used by several threads.

    Raises:
        DataError: there is no such file, it is empty, or its first line is not a passage.
    """

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_file():
            raise DataError(f"there is no file {path} (looked from {Path.cwd()}). A corpus is a JSONL file of passages")
        self._rows = JsonlFile(path)
        self._turn = threading.Lock()
        self._checked(0, self._rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> Row:
        with self._turn:  # the file has one position
            return self._rows[place]

    def texts(self) -> Iterator[str]:
        """Yield the searchable text of every passage. Raises DataError, naming file and line, for a line that is not a
        passage."""
        for place, row in enumerate(self._rows.scan(())):
            yield self._checked(place, row)

    def _checked(self, place: int, row: Row) -> str:
        text = "\n".join(part for part in passage(row) if part)
        if not text:
            raise DataError(
                f"{self._rows.where(place)} is not a passage: give `contents`, or `title` and `text`. It has: "
                f"{', '.join(row) or 'nothing'}"
            )
        return text


def passage(row: Row) -> tuple[str, str]:
    """Return (title, text), either of which may be empty."""
    contents = row.get("contents")
    if isinstance(contents, str):
        title, _, text = contents.strip().partition("\n")
        return (title.strip().strip('"'), text.strip()) if text.strip() else ("", title.strip())
    title, text = row.get("title"), row.get("text")
    return (title.strip() if isinstance(title, str) else "", text.strip() if isinstance(text, str) else "")
