"""Grade-school problems whose answer is a number, marked by `####`. `strict` and `flexible` score as verl's do."""

from __future__ import annotations

import re
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.library.answers import Answer, after_thinking, boxed_answer, right_answers
from asyncrl.rewards.library.numerals import (
    Number,
    decimal_text,
    exact,
    first_number,
    last_number,
    number_in,
    plain_notation,
    same_number,
    spelled_out,
)

MARK = "####"
MARKED = re.compile(r"#### (-?[0-9.,]+)")
NUMBER = re.compile(r"-?[0-9.,]+")
SEEN = 300
"""Number of characters at the end that are searched."""


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
            unchanged; both compare text, unless the row's answer is a number and no text. `numeric` compares numbers
            in any notation (`$1,000.`, a typographic minus, 1/2, 1e-05): the one after the last `####`, otherwise in
            the last box, otherwise the last.
        column: column of the right answer; for a whole solution (GSM8K's own `answer`) the part after its `####` is
            used.

    Raises:
        RewardError: the row has no answer, or one that is no number, or `method` is unknown.
    """
    if method not in NUMBERS:
        raise RewardError(f"gsm8k: method must be {', '.join(NUMBERS)}; got {method!r}")
    wanted = [_marked(answer) for answer in right_answers(row, column, "gsm8k")]
    numbers = [_number(answer) for answer in wanted]
    if not any(
        number is not None or NUMBER.fullmatch(str(answer)) for answer, number in zip(wanted, numbers, strict=True)
    ):
        raise RewardError(f"gsm8k needs a right answer that is a number; the row has {wanted[0]!r:.80}")
    end = completion[-SEEN:]
    texts = method != "numeric" and any(isinstance(answer, str) for answer in wanted)
    text = TEXTS[method](end) if texts else None
    number = NUMBERS[method](end) if not texts or not all(isinstance(answer, str) for answer in wanted) else None
    if text is None and number is None:
        return 0.0
    for answer, its_number in zip(wanted, numbers, strict=True):
        if isinstance(answer, str) and method != "numeric":
            right = text is not None and text in (answer, _bare(answer), spelled_out(answer), _digits(its_number))
        else:
            right = same_number(number, its_number)
        if right:
            return score
    return format_score


def strict(text: str) -> str | None:
    found = MARKED.findall(text)
    return found[-1].replace(",", "") if found else None


def flexible(text: str) -> str | None:
    """The last match that is more than a full stop; if there is none, the first match."""
    found = NUMBER.findall(text)
    return next((number for number in reversed(found) if number != "."), found[0] if found else None)


def marked_number(text: str) -> Number | None:
    """Return the number after the last `####`."""
    return first_number(text.rpartition(MARK)[2]) if MARK in text else None


def answered_number(text: str) -> Number | None:
    """Return the number after the last `####`, otherwise that in the last box, otherwise the last."""
    text = after_thinking(text)
    if MARK in text:
        return marked_number(text)
    boxed = boxed_answer(text)
    return last_number(text if boxed is None else boxed)


TEXTS = {"strict": strict, "flexible": flexible}
NUMBERS = {"strict": marked_number, "flexible": last_number, "numeric": answered_number}


def _marked(answer: Answer) -> Answer:
    """Return the final answer of a whole solution."""
    if not isinstance(answer, str):
        return answer
    if MARK in answer:
        return answer.rpartition(MARK)[2].strip().replace(",", "")
    boxed = boxed_answer(answer)
    return answer.strip() if boxed is None else boxed.strip()


def _number(answer: Answer) -> Number | None:
    return number_in(answer) if isinstance(answer, str) else exact(answer)


def _bare(answer: str) -> str:
    """Return a right answer as `strict` reads it: without commas and currency, and with an ASCII minus."""
    return plain_notation(answer).strip().replace(",", "")


def _digits(number: Number | None) -> str | None:
    """Write a number with a unit, a currency or a percent sign as `strict` reads it; None for a fraction."""
    return (
        decimal_text(number)
        if number is not None and not isinstance(number, float) and number.denominator == 1
        else None
    )
