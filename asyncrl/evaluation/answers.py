"""The answer that a completion gives, as far as a majority vote needs it: two samples agree when these texts are the
same. What is equal only mathematically (`1/2` and `0.5`) is two answers."""

from __future__ import annotations

import re
from collections.abc import Callable

Extract = Callable[[str], str | None]

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MARK = re.compile(r"####[ \t]*([^\n]+)")
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_BOX = "\\boxed{"


def boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}`, braces inside it included; None where none is closed."""
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
    """What stands in the last `<answer>...</answer>`."""
    found = _TAG.findall(text)
    return found[-1] if found else None


def marked(text: str) -> str | None:
    """The rest of the line after the last `####`, as GSM8K writes it."""
    found = _MARK.findall(text)
    return found[-1] if found else None


def last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def found_anywhere(text: str) -> str | None:
    """The tag's, else the box's, else the mark's."""
    return next((found for extract in (tagged, boxed, marked) if (found := extract(text)) is not None), None)


EXTRACTORS: dict[str, Extract] = {
    "auto": found_anywhere,
    "tag": tagged,
    "boxed": boxed,
    "hash": marked,
    "number": last_number,
    "text": lambda text: text,
}
"""By the names that `eval.answer` gives them."""


def answer_of(text: str, extract: str) -> str | None:
    """The answer in `text` without what does not tell two apart: spaces, a final full stop, `$`, thousands' commas.

    None where there is none.

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
