"""1 for the expected answer, 0 for any other text."""

from __future__ import annotations

from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.library.answers import Answer, right_answers, texts_of
from asyncrl.rewards.library.numerals import exact, number_in, same_number, spelled_out


def exact_match(completion: str, row: dict[str, Any]) -> float:
    """Compare with the row's `answer`, both stripped of surrounding white space; one of several, if it is a list. A
    number of a table is compared as a number: 0.00001 is 1e-05.

    Raises:
        RewardError: the row has no `answer`, an empty one, or one that is neither text nor number.
    """
    given = _plain(completion)
    return float(any(_same(given, answer) for answer in _answers(row)))


def exact_match_parts(completion: str, row: dict[str, Any]) -> dict[str, float]:
    """As `exact_match`, with its value as `score` and as the part `correct`, and the part `places`: the fraction of the
    answer's characters at the right position. For an advantage that uses parts (`advantage=gdpo`).

    Raises:
        RewardError: the row has no `answer`, an empty one, or one that is neither text nor number.
    """
    correct = exact_match(completion, row)
    given, wanted = _plain(completion), _plain(texts_of(_answers(row)[0])[0])
    right = sum(one == other for one, other in zip(given, wanted, strict=False))
    return {"score": correct, "correct": correct, "places": right / max(len(given), len(wanted), 1)}


def _same(given: str, wanted: Answer) -> bool:
    if any(given == _plain(text) for text in texts_of(wanted)):
        return True
    if isinstance(wanted, str) or spelled_out(given) is None:
        return False
    return same_number(number_in(given), exact(wanted))


def _plain(text: str) -> str:
    return text.strip().replace("\r\n", "\n")


def _answers(row: dict[str, Any]) -> list[Answer]:
    value = row.get("answer")
    if value is None or value != value:  # NaN is the missing value of a numeric column
        empty = "; in this row it is empty" if "answer" in row else f"; the row has: {', '.join(row)}"
        raise RewardError(f"exact_match needs the column `answer`{empty}")
    return right_answers(row, "answer", "exact_match")
