"""Tell whether a process that a test has seen still runs, even while it is ending."""

from __future__ import annotations

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Return whether `process` runs. A zombie does not, nor does another process that has got its pid."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False
