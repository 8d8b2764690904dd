"""`math`: mathematical equality of the completion's answer with the right answer, by math-verify.

Its time is bounded by the alarm signal, which only the main thread of a process gets; a reward process has its own.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.library.answers import boxed_answer, ground_truth

READ = (LatexExtractionConfig(), ExprExtractionConfig())


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
        truth = str(ground_truth(row, self._column, "math"))
        try:
            with _alarm(self._timeout_s):
                return self._score if self._equal(completion, truth) else self._wrong
        except _Alarm:
            raise RewardError(
                f"comparing with {truth!r:.80} took longer than reward.args.timeout_s={self._timeout_s:g} s",
                "timed_out",
            ) from None

    def _equal(self, completion: str, truth: str) -> bool:
        # Bare LaTeX (`x+1`, `(1,2]`) is only parsed if marked as LaTeX; a percentage only if not.
        bare = "$" not in truth and "\\boxed" not in truth and "%" not in truth
        wanted = _read(f"\\boxed{{{truth}}}" if bare else truth) or _read(truth)
        if not wanted:
            raise RewardError(f"math cannot read the right answer {truth!r:.80}")
        found = boxed_answer(completion)
        if found is not None and "%" in found:
            completion = found
        elif self._boxed:
            completion = f"\\boxed{{{found}}}" if found is not None else ""
        given = _read(completion)
        return bool(given) and verify(wanted, given, timeout_seconds=None)


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
