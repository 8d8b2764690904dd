"""Questions with short answers in `<answer>` tags, compared as in SQuAD: lower case, no punctuation, no articles."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

from asyncrl.rewards.library.answers import ANSWER_LISTS, right_answers, tagged_answer, texts_of

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
MANY_TAGS = 10
"""Limit on opening or closing tags; with more, tags were sprayed, and the score is a quarter."""


def qa_exact_match(
    completion: str,
    row: dict[str, Any],
    score: float = 1.0,
    format_score: float = 0.0,
    substring: bool = False,
    column: str = "",
) -> float:
    """`score` if the last tagged answer is one of the right ones, `format_score` if it is another, 0 without one.

    Args:
        substring: whether it suffices that the answer contains a right one.

    Raises:
        RewardError: the row has no answer.
    """
    wanted = [normalised(one) for one in right_texts(row, column, "qa_exact_match")]
    found = tagged_answer(completion)
    if found is None:
        return 0.0
    given = normalised(found)
    if substring:
        return score if any(one in given for one in wanted) else format_score
    if given not in wanted:
        return format_score
    sprayed = max(completion.count("<answer>"), completion.count("</answer>")) > MANY_TAGS
    return score / 4 if sprayed else score


def f1(completion: str, row: dict[str, Any], tagged: bool = True, column: str = "") -> dict[str, float]:
    """Words shared with the closest right answer: the harmonic mean of precision and recall, and both as parts; 0
    without an answer.

    Args:
        tagged: only the contents of `<answer>` tags are the answer; false takes the whole completion.

    Raises:
        RewardError: the row has no answer.
    """
    wanted = right_texts(row, column, "f1")
    found = tagged_answer(completion) if tagged else completion
    scores = [overlap(found, one) for one in wanted] if found is not None else [(0.0, 0.0, 0.0)]
    best, precision, recall = max(scores)
    return {"score": best, "precision": precision, "recall": recall}


def overlap(found: str, wanted: str) -> tuple[float, float, float]:
    """Return F1, precision, recall of words, counted with repetition. Two empty answers are the same."""
    given, right = normalised(found).split(), normalised(wanted).split()
    if not given or not right:
        same = float(given == right)
        return same, same, same
    shared = sum((Counter(given) & Counter(right)).values())
    if not shared:
        return 0.0, 0.0, 0.0
    precision, recall = shared / len(given), shared / len(right)
    return 2 * precision * recall / (precision + recall), precision, recall


def right_texts(row: Mapping[str, Any], column: str, reward: str) -> list[str]:
    """Right answers from a text, several texts, `{"target": either}` as in Search-R1, `{"text": several}` as in SQuAD
    (without any, no answer is right), or TriviaQA's `value` and `aliases`."""
    found = right_answers(row, column, reward, lists=ANSWER_LISTS, blank=True)
    return [text for answer in found for text in texts_of(answer)]


def normalised(text: str) -> str:
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())
