"""Where the right answer of a row stands, and how an answer is cut out of a completion."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from asyncrl.errors import RewardError

COLUMNS = ("reward_model.ground_truth", "ground_truth", "answer", "target", "solution")
"""Looked for in this order, where no column is named."""
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
BOX = "\\boxed{"


def ground_truth(row: Mapping[str, Any], column: str, reward: str) -> Any:
    """Of `column` (with dots into mappings), or of the first of `COLUMNS` that the row has.

    Raises:
        RewardError: there is none, or an empty one.
    """
    for name in [column] if column else COLUMNS:
        value: Any = row
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None and value == value:  # NaN is what a table of numbers has for none
            return value
    wanted = f"a value in column {column}" if column else f"a value in one of the columns {', '.join(COLUMNS)}"
    raise RewardError(f"{reward} needs {wanted}; the row has: {', '.join(row)}. Name it: reward.args.column=NAME")


def texts_of(value: Any) -> tuple[str, ...]:
    """How a right answer may be written. A column of whole numbers in which one is empty holds floats: 5.0 for 5."""
    whole = isinstance(value, float) and value.is_integer()
    return (str(int(value)), str(value)) if whole else (str(value),)


def tagged_answer(completion: str) -> str | None:
    """What stands in the last `<answer>...</answer>`, without white space around it."""
    found = TAGGED.findall(completion)
    return found[-1].strip() if found else None


def boxed_answer(completion: str) -> str | None:
    r"""What stands in the last `\boxed{...}`, with the braces in it; None if that does not end."""
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
