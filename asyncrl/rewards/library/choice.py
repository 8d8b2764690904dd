"""Multiple choice: scores the letter that a completion chooses."""

from __future__ import annotations

import re
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.library.answers import boxed_answer, ground_truth, tagged_answer

LETTERS = "ABCDEFGHIJ"
LETTER = re.compile(r"\(?\b([A-J])\b\)?")
SAID = re.compile(r"(?i:answer|choice|option)(?i:\s+is)?\s*[:=]?\s*(?:\*\*|\$)?\(?([A-J])\b")


def choice(
    completion: str, row: dict[str, Any], score: float = 1.0, format_score: float = 0.0, column: str = ""
) -> float:
    """`score` for the right letter, `format_score` for another one, 0 for none.

    The letter is that of the last `<answer>` tag or box; otherwise of the last `answer is B`; otherwise one alone in
    the last line. The row has a letter, or the index of the choice, counted from 0.

    Raises:
        RewardError: the row has no answer, or one that names no choice.
    """
    truth = ground_truth(row, column, "choice")
    if isinstance(truth, int) and not isinstance(truth, bool) and 0 <= truth < len(LETTERS):
        wanted = LETTERS[truth]
    else:
        found = LETTER.fullmatch(str(truth).strip().upper().rstrip("."))
        if found is None:
            raise RewardError(f"choice needs a letter from A to J, or a number from 0; the row has {truth!r:.60}")
        wanted = found.group(1)
    given = chosen(completion)
    if given is None:
        return 0.0
    return score if given == wanted else format_score


def chosen(completion: str) -> str | None:
    marked = tagged_answer(completion) or boxed_answer(completion)
    if marked is not None:
        found = LETTER.search(re.sub(r"\\text(bf)?", "", marked).strip("{} ").upper())
        return found.group(1) if found else None
    said = SAID.findall(completion)
    if said:
        return said[-1]
    lines = completion.strip().splitlines()
    alone = re.fullmatch(r"[\s(*]*([A-J])[\s).*]*", lines[-1]) if lines else None
    return alone.group(1) if alone else None
