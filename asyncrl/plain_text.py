"""Foreign text on a terminal: what a reward's error, a model's answer or a peer's name holds is shown, never obeyed.

A process that prints or logs calls `make_streams_plain()` first: every way to its output passes there, prints of user
code, warnings and tracebacks included. A log handler made before keeps the stream it has.
"""

from __future__ import annotations

import re
import sys
from typing import Any, TextIO, cast

_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and newline: escape sequences begin with one
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # line breaks of another kind, and what turns the reading direction
    "\ud800-\udfff]"  # halves of a character: they cannot be printed at all
)


def plain(text: str) -> str:
    """`text` with everything that a terminal would obey written out, as in `\\x1b[2J`. Lines stay lines."""
    return _COMMANDS.sub(_written_out, text.replace("\r\n", "\n"))


def _written_out(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


class PlainStream:
    """A text stream through which nothing passes but plain text; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.rich_proxied_file = stream
        """Where rich looks for the file itself: the live view draws with escape sequences of its own."""

    def write(self, text: str) -> int:
        self._stream.write(plain(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_streams_plain() -> None:
    """Of this process, for good: what ends it is printed after everything else is over. One that was started without a
    stream (`>&-`) has none, and what is printed goes nowhere."""
    if sys.stdout is not None and not isinstance(sys.stdout, PlainStream):
        sys.stdout = cast(TextIO, PlainStream(sys.stdout))
    if sys.stderr is not None and not isinstance(sys.stderr, PlainStream):
        sys.stderr = cast(TextIO, PlainStream(sys.stderr))
