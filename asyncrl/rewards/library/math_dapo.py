r"""Competition mathematics with a final `Answer: ...`, compared as text after Minerva's normalisation, as in verl's
`math_dapo`. Equal answers that are written differently may count as wrong here: `math` compares them as mathematics."""

from __future__ import annotations

import re
from typing import Any

from asyncrl.rewards.library.answers import Answer, boxed_answer, right_answers, texts_of
from asyncrl.rewards.library.numerals import exact, number_in, same_number, spelled_out

SEEN, SEEN_BOX = 300, 100
"""Number of characters at the end that are searched; and for a box."""
ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
NONE_FOUND = "[INVALID]"

REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
UNITS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
"""Removed in this order: removing one may make the next match."""
UNWRAPPED = (
    (re.compile(r"(.*?)\$(.*?)\$(.*)"), r"$\2$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    # \frac12 is \frac{1}{2}, \sqrt3 is \sqrt{3}.
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def math_dapo(
    completion: str,
    row: dict[str, Any],
    score: float = 1.0,
    wrong: float = -1.0,
    strict_box: bool = False,
    column: str = "",
) -> dict[str, float]:
    r"""`score` for the right answer, `wrong` for any other text; the part `acc` is 1 or 0.

    A right answer that is a number in the row, and no text, is compared as a number.

    Args:
        strict_box: only the contents of the last `\boxed{}` near the end count, unchanged.

    Raises:
        RewardError: the row has no answer.
    """
    wanted = right_answers(row, column, "math_dapo")
    end = completion[-SEEN:].replace("\r\n", "\n")
    if strict_box:
        found = boxed_answer(end[-SEEN_BOX:])
        right = any((NONE_FOUND if found is None else found) in _spellings(answer) for answer in wanted)
    else:
        said = ANSWER.findall(end)
        found = said[-1].replace("**", "") if said else NONE_FOUND
        right = any(_same(found, answer) for answer in wanted)
    return {"score": score if right else wrong, "acc": float(right)}


def _same(found: str, wanted: Answer) -> bool:
    given = normalised(found)
    if any(given == normalised(text) for text in _spellings(wanted)):
        return True
    return not isinstance(wanted, str) and same_number(number_in(given), exact(wanted))


def _spellings(answer: Answer) -> tuple[str, ...]:
    """The right answer as it is, and a decimal number in full: 0.00001 for 1e-05."""
    full = spelled_out(answer) if isinstance(answer, str) else None
    return texts_of(answer) if full is None else (*texts_of(answer), full)


def normalised(answer: str) -> str:
    """Minerva's normalisation: right of the last `=`, without units, articles and LaTeX formatting."""
    answer = answer.rpartition("=")[2]
    for before, after in REPLACED:
        answer = answer.replace(before, after)
    for unit in UNITS:
        answer = answer.replace(unit, "")
    for pattern, inside in UNWRAPPED:
        answer = pattern.sub(inside, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()
