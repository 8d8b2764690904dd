"""The last lines of a worker's log."""

from __future__ import annotations

import os

TAIL = 10
"""Number of lines shown of a worker's log on another machine."""


def log_size(log_path: str) -> int:
    """Size of the log in bytes; 0 if there is none on this machine."""
    try:
        return os.stat(log_path).st_size
    except OSError:
        return 0


def last_line(log_path: str, since: int = 0) -> str:
    """The last line that a worker wrote, which is its error if it had time to write one.

    Args:
        since: size of its log when it was started: what precedes was written by the workers before it.
    """
    try:
        return (last_lines(log_path, since) or ["it ended before it wrote a line"])[-1].strip()
    except FileNotFoundError:
        return "it ended before it opened its log"
    except OSError as error:
        return f"its log cannot be read: {error.strerror}"


def last_lines(log_path: str, since: int = 0) -> list[str]:
    """At most TAIL lines that are not blank. Raises OSError if there is no such log."""
    with open(log_path, "rb") as file:
        file.seek(max(0, since, os.fstat(file.fileno()).st_size - 4096))
        lines = file.read().decode(errors="replace").splitlines()
    return [line.rstrip() for line in lines if line.strip()][-TAIL:]
