"""`math`: mathematical equality of the completion's answer with the right answer, by math-verify.

Its time is bounded by the alarm signal, which only the main thread of a process gets; a reward process has its own.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
from collections.abc import Iterator
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.library.answers import (
    Answer,
    after_thinking,
    boxed_answers,
    right_answers,
    tagged_answer,
    texts_of,
)
from asyncrl.rewards.library.numerals import SIGNS, spelled_out

READ = (LatexExtractionConfig(), ExprExtractionConfig())
CURRENCY = re.compile(r"\\\$(?=\s*[-\d.])|^[$\u20ac\u00a3](?=[-\d.][^$]*$)")
MIXED = re.compile(r"(-)?(\d+)[ ]+(\d+)/(\d+)")
SCIENTIFIC = re.compile(r"[-+]?(\d+(?:\.\d*)?|\.\d+)[eE][-+]?(\d+)")
UNITED = re.compile(r"(-?[\d.,]+)\s*(?:[cdkm]m|ft|in|yd|mi|kg|mg|lb|oz|mph)(?:\^\{?[23]\}?)?")
"""A number and a unit that math-verify takes for variables."""
LETTERED = re.compile(r"\s*\\?(?:text(?:bf)?|mathrm|mathbf)?\{?\(([A-J])\)\}?\S*\s*\S+")
"""The letter of a choice with the choice behind it, as in `\\textbf{(C)}\\ 5`."""
ROOT = re.compile(r"\\sqrt\s*\(([^()]*)\)")
ROOT_SIGN = re.compile("\u221a\\s*\\(?(\\d+|[a-z])\\)?")
"""math-verify leaves out what follows `\\sqrt(`, and the typographic sign."""
SMALL, APART = 1e-3, 1e-3
"""math-verify rounds numbers to six places; below `SMALL` they must not differ by this share."""
FRACTION = re.compile(r"\\([dt]?)frac\s*(\\[a-zA-Z]+|\d)\s*(\\[a-zA-Z]+|\d)(?![a-zA-Z{])")
"""Without braces: `\\frac\\pi2`."""
SAID = re.compile(r"(?i)answer(?:\s+is)?\s*:?\s*(?:\*\*)?\s*([^\n*]+)")


class _Alarm(BaseException):
    """Not an Exception, since math-verify would take that for two answers that differ."""


class MathVerified:
    """`score` if both are mathematically equal (like `1/2`, `0.5` and `\\frac{1}{2}`), else `wrong`.

    Args:
        boxed: only the contents of the last `\\boxed{}` are the answer; false reads the whole completion, as
            math-verify does.
        timeout_s: seconds for parsing and comparing.

    Raises:
        ConfigError: `timeout_s` is not above 0. When called, RewardError: the row has no answer, or one that cannot be
            parsed, or comparing took too long, which does not make the answer wrong.
    """

    def __init__(
        self, boxed: bool = False, score: float = 1.0, wrong: float = 0.0, timeout_s: float = 5.0, column: str = ""
    ) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"math: timeout_s must be above 0; got {timeout_s}")
        self._boxed, self._score, self._wrong = boxed, score, wrong
        self._timeout_s, self._column = timeout_s, column
        # It warns that its own alarms are off: they would count an answer that took too long as wrong.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def __call__(self, completion: str, row: dict[str, Any]) -> float:
        truths = [text for answer in right_answers(row, self._column, "math") for text in _right(answer)]
        try:
            with _alarm(self._timeout_s):
                return self._score if self._equal(completion, truths) else self._wrong
        except _Alarm:
            raise RewardError(
                f"comparing with {truths[0]!r:.80} took longer than reward.args.timeout_s={self._timeout_s:g} s",
                "timed_out",
            ) from None

    def _equal(self, completion: str, truths: list[str]) -> bool:
        wanted = [one for text in truths for one in _read_right(text)]
        if not wanted:
            raise RewardError(f"math cannot read the right answer {truths[0]!r:.80}")
        return any(
            given and verify(wanted, given, timeout_seconds=None) and not _far_apart(wanted[0], given[0])
            for text in answers_in(completion, boxed=self._boxed)
            for given in (_read(text),)
        )


def answers_in(completion: str, *, boxed: bool) -> list[str]:
    """Return texts for math-verify, the completion's answer in each of its readings; empty if it has none.

    The last box counts, together with boxes directly before it (`\\boxed{1} and \\boxed{2}`); without a box, the last
    `<answer>` tag or `####`; otherwise what math-verify finds in the whole text, and what follows the last `answer is`.
    """
    completion = ROOT.sub(r"\\sqrt{\1}", after_thinking(completion))
    found = boxed_answers(completion)
    if not found and not boxed:
        tagged = tagged_answer(completion)
        marked = completion.rpartition("####")[2].strip().partition("\n")[0] if "####" in completion else None
        found = [text for text in (tagged, marked) if text][:1]
    if found:
        letter = LETTERED.match(found[0]) if len(found) == 1 else None
        readings = readings_of(", ".join(found)) + ([letter[1]] if letter else [])
        return [_boxed(text) for text in readings]
    if boxed:
        return []
    said = SAID.findall(completion)
    return [CURRENCY.sub("", completion), *(_boxed(text) for text in (readings_of(said[-1]) if said else ()))]


def readings_of(text: str) -> list[str]:
    """Return what an answer can mean: without currency and unit, mixed numbers and scientific notation written out."""
    text = CURRENCY.sub("", text.strip().strip("*`").strip().translate(SIGNS))
    text = ROOT.sub(r"\\sqrt{\1}", ROOT_SIGN.sub(r"\\sqrt{\1}", text))
    text = FRACTION.sub(r"\\\1frac{\2}{\3}", text.removesuffix(".").removesuffix(",").strip())
    if united := UNITED.fullmatch(text):
        text = united[1]
    if mixed := MIXED.fullmatch(text):
        sign, whole, over, below = mixed.groups()
        return [f"{sign or ''}\\frac{{{int(whole) * int(below) + int(over)}}}{{{below}}}"] if int(below) else [text]
    if not (exponent := SCIENTIFIC.fullmatch(text)):
        return [text]
    full = spelled_out(text) or text
    # Python, numpy and JSON write a point or two digits of exponent; `2e-2` may also be 2e - 2.
    ambiguous = "." not in text and exponent[1] != "1" and len(exponent[2]) == 1
    return [full, text] if ambiguous else [full]


def _right(answer: Answer) -> list[str]:
    """Return the readings of a right answer, a whole solution's is in its last box."""
    if not isinstance(answer, str):
        text = texts_of(answer)[0]
        return (
            ["-\\infty" if text.startswith("-") else "\\infty"]
            if text.strip("-+").lower().startswith("inf")
            else [text]
        )
    found = boxed_answers(answer)
    text = ", ".join(found) if found else answer.rpartition("####")[2]
    for first, last in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = text.strip().removeprefix(first).removesuffix(last)
        text = inner if len(inner) == len(text.strip()) - len(first + last) and first not in inner else text
    letter = LETTERED.match(text)
    return readings_of(text) + ([letter[1]] if letter else [])


def _far_apart(wanted: Any, given: Any) -> bool:
    """Whether two numbers that are equal to six places differ all the same, because one of them is very small."""
    if not (getattr(wanted, "is_comparable", False) and getattr(given, "is_comparable", False)):
        return False
    one, other = abs(wanted.evalf()), abs(given.evalf())
    return bool(min(one, other) < SMALL and abs(one - other) > APART * max(one, other))


def _read_right(text: str) -> list[Any]:
    # Bare LaTeX (`x+1`, `(1,2]`) is only parsed if marked as LaTeX; a percentage only if not.
    bare = "$" not in text and "%" not in text
    return _read(_boxed(text) if bare else text) or _read(text)


def _boxed(text: str) -> str:
    return text if "%" in text else f"\\boxed{{{text}}}"


def _read(text: str) -> list[Any]:
    return parse(text.replace("\\%", "%"), extraction_config=READ, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise _Alarm

    before = signal.signal(signal.SIGALRM, ring)
    left, every = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, every)
        signal.signal(signal.SIGALRM, before)
