"""The console of `asyncrl local`: it draws with escape sequences, but removes those in the texts that it prints."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from asyncrl.plain_text import plain

NO_BOUND = 10_000
"""Width in columns of a line written to a file or a pipe, which have none."""


class PlainConsole(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's, with control characters removed from strings."""
        super().print(*(plain(each) if isinstance(each, str) else each for each in objects), **options)

    def print_whole(self, table: Table) -> None:
        """Print a table without cutting cells, since `14,…` is not a number; a narrow terminal gets cells of several
        lines."""
        for column in table.columns:
            column.overflow = "fold"
        width = self.width
        self.width = width if self.is_terminal else NO_BOUND
        self.print(table)
        self.width = width

    def on_broken_pipe(self) -> None:
        """Raise the error, so that `asyncrl.cli.main` reports it as for any print: rich would exit silently with 1."""
        raise  # the BrokenPipeError that the caller is handling


def say(console: Console, *texts: str) -> None:
    """Print texts, each on lines of its own, in which nothing is markup; a terminal breaks what is too long."""
    for text in texts:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


class Drawn(Live):
    """A live display that is redrawn on request, and erased in the end. Log messages of this process are printed above
    it: on stderr they would shift the display permanently."""

    def __init__(self, console: Console) -> None:
        # With redirection, the display would go through the stream that lets only plain text pass.
        super().__init__(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._above = _Above(console)

    def start(self, refresh: bool = False) -> None:
        logging.getLogger("asyncrl").addHandler(self._above)
        super().start(refresh)

    def stop(self) -> None:
        # Otherwise everything is drawn once more, and what exceeds the terminal's height is not erased.
        if self.is_started:
            self.update("", refresh=True)
        super().stop()
        logging.getLogger("asyncrl").removeHandler(self._above)


class _Above(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        say(self._console, record.getMessage())


class LiveView:
    """What is drawn again and again on a terminal; elsewhere, lines are printed instead. Use it as a context manager.

    `_live` is the display; None without a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Drawn(console) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a text, above what is drawn."""
        say(self._console, text)


def facts(rows: Iterable[tuple[str, Text | str]]) -> Table:
    """Return a table of labels and texts, without the empty ones."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, said in rows:
        if said:
            table.add_row(Text(label, style="bold"), said)
    return table
