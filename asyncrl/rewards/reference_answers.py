"""Completions that give a row's own right answer, in each form that rewards look for it.

A reward that scores none of them above an empty completion does not recognise right answers: the run would train on
zeros.
"""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from asyncrl.checks.rewards import LIBRARY, RewardTerm
from asyncrl.errors import RewardError
from asyncrl.rewards.library.answers import ANSWER_LISTS, COLUMNS, ground_truth, right_answers, texts_of, value_of
from asyncrl.rewards.library.choice import right_letter

FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>", "The answer is {}.", "Answer: {}")
"""Forms in which rewards expect the answer. Each is scored, and the best score counts."""
PROGRAM = "a program"
"""Stands for the form of a solution in code."""
PROGRAMS = ("canonical_solution", "code", "solutions", "solution", "reference_solution", "reference_code")
"""Columns of a program that solves the row's problem: of HumanEval, MBPP, APPS and TACO, and others."""
SEARCHED = (*COLUMNS, *PROGRAMS)
GRADERS = {
    LIBRARY[name]: name for name in LIBRARY if name not in ("format", "overlong", "remote", "llm_judge", "reward_model")
}
"""Built-in rewards that compare with a right answer."""


def reference_completions(terms: Iterable[RewardTerm], row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (form, completion) of the row's right answer in every form; of its program, if one of `terms` is `code`.
    Empty if the row has neither."""
    terms = list(terms)
    if any(term.function == LIBRARY["code"] for term in terms):
        return [(PROGRAM, text) for text in _programs(row)]
    columns = [column for term in terms if isinstance(column := term.args.get("column"), str) and column]
    choice = any(term.function == LIBRARY["choice"] for term in terms)
    return [(form, form.format(text)) for text in _spellings(row, columns, choice=choice) for form in FORMS]


def reference_text(row: Mapping[str, Any], columns: Iterable[str] = ()) -> str | None:
    """Return the row's right answer as its columns have it; None if it has none, or none that is text or a number."""
    return next(iter(_texts(row, columns)), None)


def _texts(row: Mapping[str, Any], columns: Iterable[str]) -> list[str]:
    for column in (*columns, ""):
        try:
            ground_truth(row, column, "")
        except RewardError:
            continue
        try:
            answers = right_answers(row, column, "", lists=ANSWER_LISTS, blank=True)
        except RewardError:
            return []
        return list(texts_of(answers[0]))
    return []


def _spellings(row: Mapping[str, Any], columns: list[str], *, choice: bool) -> list[str]:
    """The answer, the end of a whole solution (GSM8K's), and the letter of a choice that the row has as an index or as
    text."""
    texts = _texts(row, columns)
    texts += [text.rpartition("####")[2].strip() for text in texts if "####" in text]
    if choice:
        for column in (*columns, ""):
            try:
                texts += [right_letter(right_answers(row, column, "")[0], row)]
            except RewardError:
                continue
    return list(dict.fromkeys(texts))


def _programs(row: Mapping[str, Any]) -> list[str]:
    """Completions with the row's first program, fenced, and as it is (HumanEval's continues the prompt)."""
    value: Any = next((found for name in PROGRAMS if (found := value_of(row, name))), None)
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list | tuple):
        value = next(iter(value), None)
    if not isinstance(value, str):
        return []
    return [value if "```" in value else f"```python\n{textwrap.dedent(value).strip()}\n```", value]
