"""Whether a process that a test has seen still runs, asked while it may be ending."""

from __future__ import annotations

import psutil


def is_alive(process: psutil.Process) -> bool:
    """A dead one that nobody has asked for yet is not, nor is another that has its number by now."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False
