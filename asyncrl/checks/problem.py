"""`Problems`, the messages that rules yield: each has the rule, the value and the way out."""

from __future__ import annotations

from collections.abc import Iterator

Problems = Iterator[str]


LARGEST_WAY_OUT = 1 << 16
"""Limit on the suggested divisors: larger values are not useful, and for a number with twenty zeros the search would
not end."""


def divisors(number: int) -> list[int]:
    """Return the divisors of a number as suggestions for a setting that must divide it, the smallest first."""
    return [each for each in range(1, min(number, LARGEST_WAY_OUT) + 1) if number % each == 0]
