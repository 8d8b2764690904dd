"""1 for the expected answer, 0 for any other text."""

from __future__ import annotations

from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.library.answers import texts_of


def exact_match(completion: str, row: dict[str, Any]) -> float:
    """Compare with the row's `answer`, both stripped of surrounding white space.

    Raises:
        RewardError: the row has no `answer`, or an empty one.
    """
    return float(completion.strip() in _answers(row))


def exact_match_parts(completion: str, row: dict[str, Any]) -> dict[str, float]:
    """As `exact_match`, with its value as `score` and as the part `correct`, and the part `places`: the fraction of the
    answer's characters at the right position. For an advantage that uses parts (`advantage=gdpo`).

    Raises:
        RewardError: the row has no `answer`, or an empty one.
    """
    correct = exact_match(completion, row)
    given, wanted = completion.strip(), _answers(row)[0]
    right = sum(one == other for one, other in zip(given, wanted, strict=False))
    return {"score": correct, "correct": correct, "places": right / max(len(given), len(wanted), 1)}


def _answers(row: dict[str, Any]) -> list[str]:
    value = row.get("answer")
    if value is None or value != value:  # NaN is the missing value of a numeric column
        empty = "; in this row it is empty" if "answer" in row else f"; the row has: {', '.join(row)}"
        raise RewardError(f"exact_match needs the column `answer`{empty}")
    return [text.strip() for text in texts_of(value)]
