r"""Competition mathematics with a final `Answer: ...`, compared as text after Minerva's normalisation, as in verl's
`math_dapo`. Equal answers that are written differently may count as wrong here: `math` compares them as mathematics."""

from __future__ import annotations

import re
from typing import Any

from asyncrl.rewards.library.answers import boxed_answer, ground_truth, texts_of

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

    Args:
        strict_box: only the contents of the last `\boxed{}` near the end count, unchanged.

    Raises:
        RewardError: the row has no answer.
    """
    wanted = texts_of(ground_truth(row, column, "math_dapo"))
    end = completion[-SEEN:]
    if strict_box:
        right = (boxed_answer(end[-SEEN_BOX:]) or NONE_FOUND) in wanted
    else:
        found = ANSWER.findall(end)
        right = normalised(found[-1] if found else NONE_FOUND) in map(normalised, wanted)
    return {"score": score if right else wrong, "acc": float(right)}


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
