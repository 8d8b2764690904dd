"""Finds the right answers in a row, and extracts the answer from a completion."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.library.numerals import decimal_text

COLUMNS = (
    *("reward_model.ground_truth", "ground_truth", "answer", "target", "solution"),
    *("answers", "golden_answers", "final_answer", "answerKey", "Answer", "label"),
)
"""Columns searched in this order, if none is named."""
ANSWER_LISTS = ("target", "text", "value", "aliases", "normalized_aliases")
"""Entries of a mapping with right answers: of Search-R1, SQuAD, and TriviaQA (the last three)."""
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
BOX = "\\boxed{"
BOXES = re.compile(r"\\(?:boxed|fbox)\s*\{")
UNBRACED_BOX = re.compile(r"\\boxed\s*([^\s{}$\\]+)")
BETWEEN_BOXES = re.compile(
    r"[\s$]*(?:[,;&]|\\text\{ *(?:and|or) *\}|(?:and|or)\b|,\s*(?:and|or)\b)[\s$]*", re.IGNORECASE
)
"""Text between boxes that together are one answer: `\\boxed{1} and \\boxed{2}`."""

Answer = str | int | float | Decimal | Fraction
"""A right answer: text, or a number of a table."""


def ground_truth(row: Mapping[str, Any], column: str, reward: str) -> Any:
    """Return the value of `column` (with dots into mappings), or of the first of `COLUMNS` that the row has.

    Raises:
        RewardError: there is no such value, or an empty one.
    """
    for name in [column] if column else COLUMNS:
        value = value_of(row, name)
        if not _missing(value):
            return value
    wanted = f"a value in column {column}" if column else f"a value in one of the columns {', '.join(COLUMNS)}"
    raise RewardError(f"{reward} needs {wanted}; the row has: {', '.join(row)}. Name it: reward.args.column=NAME")


def value_of(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, with dots into mappings; None if there is none."""
    value: Any = row
    for key in column.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _missing(value: Any) -> bool:
    """NaN is the missing value of a numeric column."""
    return value is None or (isinstance(value, Real) and value != value)


def right_answers(
    row: Mapping[str, Any], column: str, reward: str, *, lists: Sequence[str] = (), blank: bool = False
) -> list[Answer]:
    """Return the right answers of a row, any of which is right: of a text, a number, a list of them, or a JSON text of
    such a list (`["2"]`).

    Args:
        lists: entries to use of a mapping; without any, a mapping is refused.
        blank: whether an empty text is an answer.

    Raises:
        RewardError: there is none, or one that is neither text nor number: bytes, a boolean, a mapping.
    """
    value = ground_truth(row, column, reward)
    if isinstance(value, Mapping) and any(value.get(name) is not None for name in lists):
        value = [one for name in lists for one in _several(value.get(name)) if not _missing(one)]
        value = value or ([""] if blank else [])  # SQuAD's questions without an answer
    found = [one for one in _several(value) if not _missing(one)]
    answers = [_answer(one, reward, blank=blank) for one in found]
    if not answers:
        raise RewardError(f"{reward} found no right answer in {value!r:.80}. Another column: reward.args.column=NAME")
    return answers


def _several(value: Any) -> list[Any]:
    if hasattr(value, "tolist") and getattr(value, "shape", ()):
        value = value.tolist()  # an array
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, str) and value.lstrip().startswith('["'):
        try:
            texts = json.loads(value)
        except ValueError:
            return [value]
        return texts if all(isinstance(text, str) for text in texts) else [value]
    return [value]


def _answer(value: Any, reward: str, *, blank: bool) -> Answer:
    if hasattr(value, "dtype") and hasattr(value, "item"):
        # str() of a numpy number has the digits of its own type: 0.1 for float32, whose item() is 0.10000000149011612.
        value = value.item() if isinstance(value.item(), bool | bytes | str | int) else Decimal(str(value))
    if isinstance(value, str) and (blank or value.strip()):
        return value
    if isinstance(value, int | float | Decimal | Fraction) and not isinstance(value, bool):
        return value
    kind = "an empty text" if value == "" or isinstance(value, str) else f"of type {type(value).__name__}"
    raise RewardError(
        f"{reward} cannot compare with the right answer {value!r:.80}, which is {kind}. Give text, a number, or a list "
        "of them in the row; another column: reward.args.column=NAME"
    )


def texts_of(value: Answer) -> tuple[str, ...]:
    """Return the spellings of a right answer. A number is first written in full: 5 for 5.0 (a column of integers with
    an empty value holds floats), 0.00001 for 1e-05; then as Python prints it."""
    if isinstance(value, str):
        return (value,)
    return tuple(dict.fromkeys((decimal_text(value), str(value))))


def tagged_answer(completion: str) -> str | None:
    """Return the contents of the last `<answer>...</answer>`, stripped of white space."""
    found = TAGGED.findall(completion)
    return found[-1].strip() if found else None


def boxed_answer(completion: str) -> str | None:
    r"""Return the contents of the last `\boxed{...}`, including inner braces; None if it is not closed."""
    start = completion.rfind(BOX)
    return None if start < 0 else _contents(completion, start + len(BOX))


def boxed_answers(completion: str) -> list[str]:
    r"""Return the contents of the last box, and of those directly before it (`\boxed{1} and \boxed{2}`). An earlier box
    with other text behind it is corrected by the last."""
    boxes = _boxes(completion)
    if not boxes:
        return UNBRACED_BOX.findall(completion)[-1:]
    if boxes[-1][2] is None:
        return [""]  # cut off: an earlier box was not the last word
    found: list[str] = []
    behind = len(completion)
    for start, end, contents in reversed(boxes):
        if contents is None or (found and not BETWEEN_BOXES.fullmatch(completion, end, behind)):
            break
        found.insert(0, contents)
        behind = start
    return list(dict.fromkeys(found))


def after_thinking(completion: str) -> str:
    """Return what follows the last `</think>`, since a box among the thoughts is no answer; the whole text if nothing
    does."""
    answer = completion.rpartition("</think>")[2]
    return answer if answer.strip() else completion


def _boxes(completion: str) -> list[tuple[int, int, str | None]]:
    """(start, end, contents) of each outermost box; contents are None if it is not closed."""
    boxes: list[tuple[int, int, str | None]] = []
    position = 0
    while found := BOXES.search(completion, position):
        contents = _contents(completion, found.end())
        position = len(completion) if contents is None else found.end() + len(contents) + 1
        boxes.append((found.start(), position, contents))
    return boxes


def _contents(completion: str, first: int) -> str | None:
    """Return the text up to the brace that closes the one before `first`; None if none does."""
    depth = 1
    for place in range(first, len(completion)):
        depth += {"{": 1, "}": -1}.get(completion[place], 0)
        if depth == 0:
            return completion[first:place]
    return None
