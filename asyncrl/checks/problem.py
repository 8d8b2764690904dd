"""What a rule yields: the rule, the value, the way out, as one message each."""

from __future__ import annotations

from collections.abc import Iterator

Problems = Iterator[str]


LARGEST_WAY_OUT = 1 << 16
"""Nobody sets more, and of a number with twenty zeros the search for all would not end."""


def divisors(number: int) -> list[int]:
    """The ways out where a setting must divide it, the smallest first."""
    return [each for each in range(1, min(number, LARGEST_WAY_OUT) + 1) if number % each == 0]
