"""The console of `asyncrl local`: it draws with escape sequences, and prints none that came with a text."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.live import Live

from asyncrl.plain_text import plain


class PlainConsole(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's; strings are made plain."""
        super().print(*(plain(each) if isinstance(each, str) else each for each in objects), **options)

    def on_broken_pipe(self) -> None:
        """As any other print, for `asyncrl.cli.main` to say so: rich would end the process without a word, with 1."""
        raise  # what is handled where this is called


def live_on(console: Console) -> Live | None:
    """What is drawn anew on a terminal and gone in the end; None where there is none, and lines are printed."""
    if not console.is_terminal:
        return None
    # Redirected, its drawing would go through the stream that lets only plain text pass.
    return Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
