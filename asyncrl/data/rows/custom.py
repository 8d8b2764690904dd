"""Rows of a user's class: any object with a length and rows by number. Its code runs in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncrl.data.rows.base import Row, Rows, no_rows, plain
from asyncrl.data.rows.messages import MADE_NULLS, without_made_nulls
from asyncrl.errors import ConfigError, DataError
from asyncrl.user_code import load_function


class CustomRows(Rows):
    """Rows of the object that `FILE.py:NAME` returns when called with `args`.

    Raises:
        ConfigError: it cannot be loaded or constructed, or has no length or no `__getitem__`.
        DataError: it has no rows.
    """

    def __init__(self, spec: str, args: Mapping[str, Any], key: str = "data.path") -> None:
        self._spec = spec
        given = f"{key}={spec}"
        factory = load_function(spec, key)
        try:
            self._rows: Any = factory(**args)
            self._count = len(self._rows)
        except Exception as error:  # user code at a process boundary: whatever it raises is one refused setting
            why = f"{type(error).__name__}: {error}"
            said = ", ".join(f"{name}={value!r}" for name, value in args.items())
            raise ConfigError(
                f"{given}: len({spec.rpartition(':')[2]}({said})) failed: {why}. Give a class with __len__ and "
                "__getitem__; its arguments are data.args.NAME=VALUE"
            ) from error
        if not callable(getattr(self._rows, "__getitem__", None)):
            raise ConfigError(f"{given} made a {type(self._rows).__name__}, which has no __getitem__. Give it one")
        if not self._count:
            raise no_rows(spec)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> Row:
        try:
            found = plain(self._rows[row])
        except Exception as error:  # user code at a process boundary: one row that cannot be used
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(f"{self.where(row)} failed: {why:.400}. Fix the class, or the row") from error
        if not isinstance(found, dict):
            raise DataError(f'{self.where(row)} is a {type(found).__name__}. A row is a dict like {{"prompt": "..."}}')
        # Many of these classes read with `datasets`, which has the nulls of Arrow.
        return {name: without_made_nulls(value, name in MADE_NULLS) for name, value in found.items()}

    def where(self, row: int) -> str:
        return f"{self._spec}[{row}]"

    def scan(self, columns: Sequence[str]) -> Iterator[Row]:
        return (self[row] for row in range(self._count))
