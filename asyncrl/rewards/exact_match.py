"""1 for the expected answer, 0 for any other text."""

from __future__ import annotations

from typing import Any

from asyncrl.errors import RewardError


def exact_match(completion: str, row: dict[str, Any]) -> float:
    """Compare with the row's `answer`, both stripped of surrounding white space.

    Raises:
        RewardError: the row has no `answer`.
    """
    if "answer" not in row:
        raise RewardError(f"exact_match needs the column `answer`; the row has: {', '.join(row)}")
    return float(completion.strip() == str(row["answer"]).strip())
