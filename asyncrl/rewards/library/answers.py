"""Finds the right answer in a row, and extracts the answer from a completion."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from asyncrl.errors import RewardError

COLUMNS = ("reward_model.ground_truth", "ground_truth", "answer", "target", "solution")
"""Columns searched in this order, if none is named."""
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
BOX = "\\boxed{"


def ground_truth(row: Mapping[str, Any], column: str, reward: str) -> Any:
    """Return the value of `column` (with dots into mappings), or of the first of `COLUMNS` that the row has.

    Raises:
        RewardError: there is no such value, or an empty one.
    """
    for name in [column] if column else COLUMNS:
        value: Any = row
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None and value == value:  # NaN is the missing value of a numeric column
            return value
    wanted = f"a value in column {column}" if column else f"a value in one of the columns {', '.join(COLUMNS)}"
    raise RewardError(f"{reward} needs {wanted}; the row has: {', '.join(row)}. Name it: reward.args.column=NAME")


def texts_of(value: Any) -> tuple[str, ...]:
    """Return the spellings of a right answer. A column of integers with an empty value holds floats: 5.0 for 5."""
    whole = isinstance(value, float) and value.is_integer()
    return (str(int(value)), str(value)) if whole else (str(value),)


def tagged_answer(completion: str) -> str | None:
    """Return the contents of the last `<answer>...</answer>`, stripped of white space."""
    found = TAGGED.findall(completion)
    return found[-1].strip() if found else None


def boxed_answer(completion: str) -> str | None:
    r"""Return the contents of the last `\boxed{...}`, including inner braces; None if it is not closed."""
    start = completion.rfind(BOX)
    if start < 0:
        return None
    depth = 1
    first = start + len(BOX)
    for place in range(first, len(completion)):
        depth += {"{": 1, "}": -1}.get(completion[place], 0)
        if depth == 0:
            return completion[first:place]
    return None
