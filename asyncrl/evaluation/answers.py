"""Extracts the answer from a completion, for majority votes. Two samples agree if these texts are equal; answers that
are only mathematically equal (`1/2` and `0.5`) count as different."""

from __future__ import annotations

import re
from collections.abc import Callable

Extract = Callable[[str], str | None]

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MARK = re.compile(r"####[ \t]*([^\n]+)")
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_BOX = "\\boxed{"


def boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}`, with nested braces; None if none is closed."""
    start = text.rfind(_BOX)
    while start >= 0:
        depth = 1
        for place in range(start + len(_BOX), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start + len(_BOX) : place]
        start = text.rfind(_BOX, 0, start)
    return None


def tagged(text: str) -> str | None:
    """The content of the last `<answer>...</answer>`."""
    found = _TAG.findall(text)
    return found[-1] if found else None


def marked(text: str) -> str | None:
    """The rest of the line after the last `####` (GSM8K's format)."""
    found = _MARK.findall(text)
    return found[-1] if found else None


def last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def found_anywhere(text: str) -> str | None:
    """The answer in a tag, else in a box, else after a mark."""
    return next((found for extract in (tagged, boxed, marked) if (found := extract(text)) is not None), None)


EXTRACTORS: dict[str, Extract] = {
    "auto": found_anywhere,
    "tag": tagged,
    "boxed": boxed,
    "hash": marked,
    "number": last_number,
    "text": lambda text: text,
}
"""Extractors by their names in `eval.answer`."""


def answer_of(text: str, extract: str) -> str | None:
    """The answer in `text`, normalised: without extra spaces, a final full stop, `$` and thousands separators.

    None if there is no answer.

    Args:
        extract: one of `EXTRACTORS`.
    """
    found = EXTRACTORS[extract](text)
    if found is None:
        return None
    plain = " ".join(found.replace("$", " ").split()).removesuffix(".").strip()
    if _NUMBER.fullmatch(plain):
        plain = plain.replace(",", "").removeprefix("+")
    return plain or None
