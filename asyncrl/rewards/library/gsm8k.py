"""Grade-school problems whose answer is a number, marked by `####`. `strict` and `flexible` score as verl's do."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.library.answers import ground_truth, texts_of

MARKED = re.compile(r"#### (-?[0-9.,]+)")
NUMBER = re.compile(r"-?[0-9.,]+")
SEEN = 300
"""Number of characters at the end that are searched."""
MINUS = str.maketrans({"\u2212": "-", "\u2013": "-", "\uff0d": "-"})


def gsm8k(
    completion: str,
    row: dict[str, Any],
    method: str = "strict",
    score: float = 1.0,
    format_score: float = 0.0,
    column: str = "",
) -> float:
    """`score` for the right answer, `format_score` for another one, 0 for none.

    Args:
        method: `strict` takes the last number after `#### `, without commas; `flexible` the last number of the text,
            unchanged; both compare text. `numeric` takes the last number in any notation (`$1,000.`, a typographic
            minus) and compares numbers.
        column: column of the right answer; for a whole solution (GSM8K's own `answer`) the part after its `####` is
            used.

    Raises:
        RewardError: the row has no answer, or `method` is unknown.
    """
    if method not in EXTRACT:
        raise RewardError(f"gsm8k: method must be {', '.join(EXTRACT)}; got {method!r}")
    wanted = texts_of(ground_truth(row, column, "gsm8k"))
    if "####" in wanted[0]:
        wanted = (wanted[0].rpartition("####")[2].strip().replace(",", ""),)
    found = EXTRACT[method](completion[-SEEN:])
    if found is None:
        return 0.0
    right = same_number(found, wanted[0]) if method == "numeric" else found in wanted
    return score if right else format_score


def strict(text: str) -> str | None:
    found = MARKED.findall(text)
    return found[-1].replace(",", "") if found else None


def flexible(text: str) -> str | None:
    """The last match that is more than a full stop; if there is none, the first match."""
    found = NUMBER.findall(text)
    return next((number for number in reversed(found) if number != "."), found[0] if found else None)


def numeric(text: str) -> str | None:
    found = [number.rstrip(".,") for number in NUMBER.findall(text.translate(MINUS))]
    return next((number for number in reversed(found) if any(map(str.isdigit, number))), None)


EXTRACT = {"strict": strict, "flexible": flexible, "numeric": numeric}


def same_number(found: str, wanted: str) -> bool:
    plain = [text.translate(MINUS).replace(",", "").replace("$", "").strip(" .%") for text in (found, wanted)]
    try:
        return Decimal(plain[0]) == Decimal(plain[1])
    except InvalidOperation:
        return plain[0] == plain[1]
