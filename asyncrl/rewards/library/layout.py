"""`format`: whether a completion has a wanted form."""

from __future__ import annotations

import re
from typing import Any

from asyncrl.errors import ConfigError

STYLES = {
    "think_answer": r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*",
    "think": r"\s*<think>(?:(?!</?think>).)*</think>(?:(?!</?think>).)*",
    "answer": r"(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)*</answer>\s*",
    "boxed": r".*\\boxed\{.+\}.*",
}


class Format:
    """`score` for a completion that has the form as a whole, else `wrong`.

    Args:
        style: `think_answer` (each tag once, in that order), `think`, `answer` or `boxed`.
        pattern: instead, a regular expression for the whole completion; `.` matches line ends too.

    Raises:
        ConfigError: no such style, or an invalid expression.
    """

    def __init__(self, style: str = "think_answer", pattern: str = "", score: float = 1.0, wrong: float = 0.0) -> None:
        if style not in STYLES:
            raise ConfigError(f"format: style must be {', '.join(STYLES)}; got {style!r}. Or give pattern")
        try:
            self._pattern = re.compile(pattern or STYLES[style], re.DOTALL)
        except re.error as error:
            raise ConfigError(f"format: pattern={pattern!r} is not a valid regular expression: {error}") from error
        self._score, self._wrong = score, wrong

    def __call__(self, completion: str, row: dict[str, Any]) -> float:
        return self._score if self._pattern.fullmatch(completion) else self._wrong
