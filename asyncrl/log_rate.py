"""Which repetitions of a warning are logged: all of them would fill a disk."""

from __future__ import annotations


def is_power_of_ten(count: int) -> bool:
    """Whether this is the 1st, 10th, 100th... time. What always fails stalls a run, so the first must be seen."""
    return str(count).strip("0") == "1"
