"""Compares what a program printed or returned with what a test wants."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

from asyncrl.rewards.library.code_tests import UNREADABLE, loads

SET = "\0set"
"""Key of a mapping that stands for a set, in what `CALLER` prints."""
CLOSE = 1e-6
"""Relative difference of floating-point results that counts as equal, as judges of contests have it."""
ABOUT_ZERO = 1e-9
DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
INTEGER = re.compile(r"[-+]?\d+")
NOT_FINITE = re.compile(r"[-+]?(?:inf|infinity|nan)", re.IGNORECASE)
MOST_UNORDERED = 2000
"""Limit on the elements of sets that are compared pair by pair."""


def same_text(given: str, wanted: str) -> bool:
    """Whether the texts are equal except for white space at the ends of lines and of the whole, and the last digits of
    floating-point numbers."""
    one, other = ([line.rstrip() for line in text.strip().splitlines()] for text in (given, wanted))
    return len(one) == len(other) and all(map(_same_line, one, other))


def _same_line(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    one, other = re.split(r"(\s+)", given), re.split(r"(\s+)", wanted)
    return len(one) == len(other) and all(map(_same_word, one, other))


def _same_word(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    if NOT_FINITE.fullmatch(wanted):
        return given.lower().replace("infinity", "inf") == wanted.lower().replace("infinity", "inf")
    if not DECIMAL.fullmatch(given) or not DECIMAL.fullmatch(wanted):
        return False
    if INTEGER.fullmatch(wanted):  # as floats, long integers that differ in the last digits are equal
        return not INTEGER.fullmatch(given) and Decimal(given) == Decimal(wanted)
    return math.isclose(float(given), float(wanted), rel_tol=CLOSE, abs_tol=ABOUT_ZERO)


def same_result(said: str, wanted: Any, text: str | None = None) -> bool:
    """Whether the results are equal as JSON; floating-point numbers to six digits. APPS wraps a result in a list of
    one, which is accepted too.

    Args:
        text: the wanted result as the row has it, if that is text, which a function may return unread.
    """
    try:
        given = loads(said)
        if text is not None and isinstance(given, str) and given == text:
            return True
        right = _plain(wanted)
        return _equal(given, right) or (isinstance(right, list) and len(right) == 1 and _equal(given, right[0]))
    except (OverflowError, *UNREADABLE):  # OverflowError: a float compared with a too large integer
        return False


def _plain(value: Any) -> Any:
    """Return what Python wrote as JSON has it: keys as texts, tuples as lists, sets as `CALLER` writes them."""
    if isinstance(value, dict):
        return {_key(key): _plain(one) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return {SET: [_plain(one) for one in value]}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _key(key: Any) -> str:
    if isinstance(key, bool) or key is None:
        return {True: "true", False: "false", None: "null"}[key]
    return str(key)


def _equal(given: Any, wanted: Any) -> bool:
    sets = [set_of[SET] if isinstance(set_of, dict) and set_of.keys() == {SET} else None for set_of in (given, wanted)]
    if sets != [None, None]:
        return _same_set(*(one if one is not None else other for one, other in zip(sets, (given, wanted), strict=True)))
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(_equal(given[key], wanted[key]) for key in given)
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(_equal, given, wanted))
    if isinstance(given, float) and isinstance(wanted, float | int):
        return _close(given, wanted)
    if isinstance(given, int) and isinstance(wanted, float):
        return _close(given, wanted)
    return type(given) is type(wanted) and given == wanted


def _close(given: float, wanted: float) -> bool:
    if isinstance(given, bool) or isinstance(wanted, bool):
        return False
    if given == wanted or (given != given and wanted != wanted):
        return True
    if isinstance(wanted, int) and abs(wanted) >= 2**53:
        return False
    return math.isclose(given, wanted, rel_tol=CLOSE, abs_tol=ABOUT_ZERO)


def _same_set(given: Any, wanted: Any) -> bool:
    """Whether both have the same elements in any order."""
    if not isinstance(given, list) or not isinstance(wanted, list) or len(given) != len(wanted):
        return False
    if len(given) > MOST_UNORDERED:
        return sorted(map(repr, given)) == sorted(map(repr, wanted))
    left = list(wanted)
    for one in given:
        place = next((place for place, other in enumerate(left) if _equal(one, other)), None)
        if place is None:
            return False
        del left[place]
    return True
