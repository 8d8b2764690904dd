"""Multiple choice: scores the letter that a completion chooses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.library.answers import Answer, after_thinking, boxed_answer, right_answers, tagged_answer, value_of

LETTERS = "ABCDEFGHIJ"
CHOICES = ("choices", "options", "endings", "question.choices")
"""Columns of the choices: texts, or a mapping with `text` and `label`."""
DRESS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed|textit|mathit|rm|bf)\b|\\[ ,;()\[\]]|[*_`$\"'\u201c\u201d]")
"""Markdown, quotes and LaTeX around a letter."""
LETTER = re.compile(r"[\s({\[]*(?:(?i:option|choice|answer)\s*:?\s*)?[({\[]*([A-Ja-j])[)}\]]*")
"""A letter in any brackets."""
BEHIND = re.compile(r"\s*$|\s*[.:,;)\-\u2013\u2014\n]|[}\]]")
"""What may follow a letter in a tag, a box or a column: nothing, or a sign and the text of the choice."""
SAID = re.compile(
    r"(?i:\b(?:answer|choice|option)\b|\u7b54\u6848)[\s)\]]*(?:(?i:is|would be|must be|should be|=)|\u662f|\u4e3a)?"
    r"\s*[:=\uff1a\-\u2013]?\s*(?i:(?:most likely|probably|clearly|therefore|thus|option|choice|letter)\s+)*"
    r"[({\[]*(?:([A-J])(?![A-Za-z'\u2019])|([a-j])(?=[)}\]]|\s*(?:[.,;:]|$|\n)))"
)
ALSO_SAID = re.compile(
    r"\b([A-J])[)\]]?\s+(?:is|seems|must be)\s+(?:the\s+)?(?:(?!not\b)\w+\s+)?(?:correct|right|answer)\b"
)
ALONE = re.compile(r"[\s({\[]*([A-Ja-j])[\s)}\].:]*")
LISTED = re.compile(r"[\s({\[]*([A-J])[)\].:]\s*\S.*")
HEDGED = re.compile(
    r"[)}\]\s]*(?:"
    r"(?:and|or)\b\s*[({\[]*[A-J]|[,/&+]\s*[({\[]*(?:[B-HJ]|[AI](?!\s+[a-z]))|\s*[({\[]+[A-J](?=[)}\]])|\s+[A-J](?=\W*$)"
    r")(?![A-Za-z'\u2019])[)}\]]*(?!\s+(?:is|are|was|were|seems|cannot|can|would|does|do|has|states|says)\b)"
)
"""Another letter right behind one: `A or B`, `A, B` name no choice."""
BRACKETED = re.compile(r"\(([A-J])\)")
PRONOUN = re.compile(
    r"I\s+(?:think|believe|guess|am|would|will|do|did|can|could|chose|choose|pick|was|have|know|need|say)\b"
)


def choice(
    completion: str, row: dict[str, Any], score: float = 1.0, format_score: float = 0.0, column: str = ""
) -> float:
    """`score` for the right letter, `format_score` for another one, 0 for none.

    The letter is that of the last `<answer>` tag or box; otherwise of the last `answer is B`; otherwise one alone, or
    before its choice (`B) Paris`), in the last line. The row has a letter, the index of the choice, counted from 0, or
    its text if it also has the choices.

    Raises:
        RewardError: the row has no answer, or one that names no choice.
    """
    wanted = [right_letter(answer, row) for answer in right_answers(row, column, "choice")]
    given = chosen(completion)
    if given is None:
        return 0.0
    return score if given in wanted else format_score


def right_letter(truth: Answer, row: Mapping[str, Any]) -> str:
    """Return the letter of a right answer. Raises RewardError: it names no choice."""
    texts, labels = _choices(row)
    if isinstance(truth, str):
        text = truth.strip()
        if text in labels:
            return text if len(text) == 1 and text in LETTERS else LETTERS[labels.index(text)]
        if texts.count(text) == 1:
            return LETTERS[texts.index(text)]
        found = _letter(text)
        if found is not None:
            return found
    elif isinstance(truth, int | float | Decimal | Fraction) and truth in range(len(LETTERS)):
        return LETTERS[int(truth)]
    more = ""
    if isinstance(truth, str) and truth.strip().isdigit():
        more = ". A digit as text may count from 0 or from 1: give a number (from 0) or a letter"
    raise RewardError(f"choice needs a letter from A to J, or a number from 0; the row has {truth!r:.60}{more}")


def _choices(row: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[str]]:
    """Texts and labels of the row's choices; at most as many as there are letters."""
    found = next((value for name in CHOICES if (value := value_of(row, name)) is not None), ())
    if isinstance(found, Mapping):
        texts, labels = found.get("text", ()), found.get("label", ())
        if not labels and all(isinstance(text, str) for text in found.values()):
            texts, labels = list(found.values()), list(found)
    else:
        texts, labels = found, ()
    if not isinstance(texts, list | tuple) or not isinstance(labels, list | tuple):
        return (), ()
    most = len(LETTERS)
    return [str(text).strip() for text in texts[:most]], [str(label).strip() for label in labels[:most]]


def chosen(completion: str) -> str | None:
    """Return the letter that a completion chooses; None if it chooses none."""
    completion = after_thinking(completion)
    tagged = tagged_answer(completion)
    boxed = boxed_answer(completion if tagged is None else tagged)
    marked = tagged if boxed is None else boxed
    if marked is not None:
        return _letter(marked)
    text = DRESS.sub("", PRONOUN.sub("", completion))
    said = [(found.end(), found.end(), (found[1] or found[2]).upper()) for found in SAID.finditer(text)]
    said += [(found.end(), found.end(1), found[1]) for found in ALSO_SAID.finditer(text)]
    if said:
        _, behind, letter = max(said)
        return None if HEDGED.match(text, behind) else letter
    lines = text.strip().splitlines()
    if not lines:
        return None
    if alone := ALONE.fullmatch(lines[-1]) or LISTED.fullmatch(lines[-1]):
        return None if HEDGED.match(lines[-1], alone.end(1)) else alone[1].upper()
    bracketed = set(BRACKETED.findall(lines[-1]))
    return bracketed.pop() if len(bracketed) == 1 else None


def _letter(text: str) -> str | None:
    """Return the letter with which a short text begins; or that `answer is B` in it names."""
    text = DRESS.sub(" ", text).strip()
    found = LETTER.match(text)
    if found and HEDGED.match(text, found.end(1)):
        return None
    bracketed = found is not None and text[found.start(1) - 1 : found.start(1)] in ("(", "{", "[")
    if found and (BEHIND.match(text, found.end()) or bracketed or BEHIND.match(text, found.end(1))):
        return found[1].upper()
    said = SAID.findall(text)
    return (said[-1][0] or said[-1][1]).upper() if said else None
