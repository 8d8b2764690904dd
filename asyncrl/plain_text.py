"""Escapes control sequences in output, so that text from a reward, a model or a peer cannot control the terminal.

A process that prints or logs calls `make_streams_plain()` first. From then on all its output is escaped, including
prints of user code, warnings and tracebacks. A log handler created earlier keeps its old stream.
"""

from __future__ import annotations

import io
import re
import sys
from typing import Any, TextIO, cast

_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and newline: escape sequences begin with one
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # other line separators, and marks that change the reading direction
    "\ud800-\udfff]"  # lone surrogates: they cannot be printed
)


def plain(text: str) -> str:
    """`text` with everything a terminal would interpret escaped, as in `\\x1b[2J`. Newlines and tabs stay."""
    return _COMMANDS.sub(_written_out, text.replace("\r\n", "\n"))


def _written_out(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


class PlainStream:
    """Wraps a text stream and escapes what is written to it. Other attributes are the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.rich_proxied_file = stream
        """The attribute by which rich finds the real file, since the live view draws with escape sequences."""

    def write(self, text: str) -> int:
        self._stream.write(plain(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_streams_plain() -> None:
    """Wrap stdout and stderr of this process for its lifetime: a final traceback is printed after everything else. A
    process started without a stream (`>&-`) keeps having none."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what its encoding lacks (Latin-1, ASCII) is written out, no error
            stream.reconfigure(errors="backslashreplace")
    if sys.stdout is not None and not isinstance(sys.stdout, PlainStream):
        sys.stdout = cast(TextIO, PlainStream(sys.stdout))
    if sys.stderr is not None and not isinstance(sys.stderr, PlainStream):
        sys.stderr = cast(TextIO, PlainStream(sys.stderr))
