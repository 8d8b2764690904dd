"""The console of `asyncrl local`: it draws with escape sequences, and prints none that came with a text."""

from __future__ import annotations

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


def live_on(console: Console) -> Live | None:
    """What is drawn anew on a terminal and gone in the end; None where there is none, and lines are printed."""
    if not console.is_terminal:
        return None
    # Redirected, its drawing would go through the stream that lets only plain text pass.
    return Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
