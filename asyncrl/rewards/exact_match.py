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


def exact_match_parts(completion: str, row: dict[str, Any]) -> dict[str, float]:
    """The same as `score` and as the part `correct`, and the part `places`: the share of the answer's characters that
    stand where they should. For an advantage that looks at parts (`advantage=gdpo`).

    Raises:
        RewardError: the row has no `answer`.
    """
    correct = exact_match(completion, row)
    given, wanted = completion.strip(), str(row["answer"]).strip()
    right = sum(one == other for one, other in zip(given, wanted, strict=False))
    return {"score": correct, "correct": correct, "places": right / max(len(given), len(wanted), 1)}
