"""The last lines of a worker's log."""

from __future__ import annotations

import os

TAIL = 10
"""Number of lines shown of a worker's log on another machine."""


def last_line(log_path: str) -> str:
    """The last line that a worker wrote, which is its error if it had time to write one."""
    try:
        return (last_lines(log_path) or ["nothing logged"])[-1].strip()
    except OSError:
        return "no log on this machine"


def last_lines(log_path: str) -> list[str]:
    """At most TAIL lines that are not blank. Raises OSError if there is no such log."""
    with open(log_path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        lines = file.read().decode(errors="replace").splitlines()
    return [line.rstrip() for line in lines if line.strip()][-TAIL:]
