"""The console of `asyncrl local`: it draws with escape sequences, and prints none that came with a text."""

from __future__ import annotations

import logging
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from asyncrl.plain_text import plain

NO_BOUND = 10_000
"""Columns of a line that goes into a file or a pipe: whoever reads it there has no width."""


class PlainConsole(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's; strings are made plain."""
        super().print(*(plain(each) if isinstance(each, str) else each for each in objects), **options)

    def print_whole(self, table: Table) -> None:
        """No cell of it is cut: `14,…` is no number. A narrow terminal gets cells of several lines."""
        for column in table.columns:
            column.overflow = "fold"
        width = self.width
        self.width = width if self.is_terminal else NO_BOUND
        self.print(table)
        self.width = width

    def on_broken_pipe(self) -> None:
        """As any other print, for `asyncrl.cli.main` to say so: rich would end the process without a word, with 1."""
        raise  # what is handled where this is called


class Drawn(Live):
    """Anew and anew, and gone in the end. What this process logs meanwhile is printed above it: on stderr it would
    shift what is drawn, for good."""

    def __init__(self, console: Console) -> None:
        # Redirected, its drawing would go through the stream that lets only plain text pass.
        super().__init__(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._above = _Above(console)

    def start(self, refresh: bool = False) -> None:
        logging.getLogger("asyncrl").addHandler(self._above)
        super().start(refresh)

    def stop(self) -> None:
        if self.is_started:  # else all of it is drawn once more, and what is higher than the terminal not erased
            self.update("", refresh=True)
        super().stop()
        logging.getLogger("asyncrl").removeHandler(self._above)


class _Above(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(record.getMessage(), markup=False, highlight=False, soft_wrap=True)


def live_on(console: Console) -> Live | None:
    """None where there is no terminal, and lines are printed."""
    return Drawn(console) if console.is_terminal else None
