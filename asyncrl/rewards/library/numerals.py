"""Reads and writes numbers in the notations of data sets and completions.

`number_in` returns exact values, so that long integers that differ in the last digit differ. Units, currencies and a
percent sign are left out: a problem that asks for a percentage is answered by `50` or `50%`.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction

Number = Fraction | float
"""A float only if infinite."""
LONGEST = 400
"""Limit on exponents: more would fill the memory with zeros."""

SIGNS = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u2012": "-",
        "\ufe63": "-",
        "\uff0d": "-",
        "\uff0b": "+",
        "\uff0e": ".",
        "\uff0c": ",",
    }
)
"""Typographic signs, as ASCII."""
DIGITS = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207a", "0123456789-+")
VULGAR = {"\u00bd": "1/2", "\u00bc": "1/4", "\u00be": "3/4", "\u2153": "1/3", "\u2154": "2/3", "\u215b": "1/8"}
SUPERSCRIPT = re.compile("10([\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+)")
SPACES = re.compile(r"\\[,;:! ]|~|[\u00a0\u2009\u202f]")
"""LaTeX's and typographic spaces, also between thousands."""
WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox|boxed|textit|mathit)\s*\{([^{}]*)\}")
CURRENCY = re.compile(r"\\?[$\u20ac\u00a3\u00a5\u20b9]|\b(?:USD|EUR|GBP|Rs\.?)\s*(?=[\d.-])")

PLAIN = r"(?:\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)|\d+)(?:\.\d*)?|\.\d+"
FRACTION = r"\\[dt]?frac\s*(?:\{\s*(?P<top>-?\d+)\s*\}\s*\{\s*(?P<under>\d+)\s*\}|(?P<top1>\d)\s*(?P<under1>\d))"
NUMERAL = re.compile(
    r"(?<![\^_])(?<![\^_]\{)(?P<sign>(?<![\w.)\]}])[-+]\s?)?"
    rf"(?:(?P<whole>\d+)\s*{FRACTION}|(?P<mixed>\d+)\s+(?P<over>\d+)/(?P<below>\d+)|"
    rf"(?P<number>{PLAIN})\s*/\s*(?P<divisor>{PLAIN})|"
    rf"(?P<digits>{PLAIN})(?:[eE](?P<exponent>[-+]?\d+)(?!\w))?|"
    rf"{FRACTION.replace('top', 'n').replace('under', 'd')})"
)
TEN = r"10\s*(?:\^|\*\*)\s*\{?\s*([-+]?\d+)\s*\}?"
MULTIPLIED = re.compile(rf"(?<=\d)\s*(?:\\times|\\cdot|x|\*|\u00d7|\u00b7)\s*{TEN}")
POWER = re.compile(rf"(?<![\d.]){TEN}")
WORDS = r"(?:\s+[A-Za-z]|\s*[A-Za-z/]{2,})(?:[A-Za-z/]*(?:\s+[A-Za-z/]+){0,3})(?:\^?\{?[23]\}?)?"
UNIT = re.compile(rf"\s*(?:\\?%|\^?\{{?\\circ\}}?|\u00b0|\u20ac|\u00a3|{WORDS})?\.?")
INFINITE = re.compile(r"([-+]?)\s*(?:inf|infinity|\\infty|\u221e)", re.IGNORECASE)
SCIENTIFIC = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+")


def number_in(text: str) -> Number | None:
    """Return the number that the text is as a whole, with a currency, unit or percent sign; None for any other text."""
    text = plain_notation(text).strip().strip("*_`").strip().rstrip(".,").strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    if endless := INFINITE.fullmatch(text):
        return -math.inf if endless[1] == "-" else math.inf
    found = NUMERAL.match(text)
    if found is None or not UNIT.fullmatch(text, found.end()):
        return None
    return _value(found)


def last_number(text: str) -> Number | None:
    """Return the last number in the text; None if it has none."""
    values = [_value(found) for found in NUMERAL.finditer(plain_notation(text))]
    return next((value for value in reversed(values) if value is not None), None)


def first_number(text: str) -> Number | None:
    """Return the first number in the text; None if it has none."""
    found = NUMERAL.search(plain_notation(text))
    return _value(found) if found else None


def same_number(one: Number | None, other: Number | None) -> bool:
    """Whether two numbers are equal: integers exactly, others to nine digits, since a table may hold floats."""
    if one is None or other is None:
        return False
    if one == other:
        return True
    if isinstance(one, float) or isinstance(other, float) or one.denominator == other.denominator == 1:
        return False
    return abs(one - other) <= max(abs(one), abs(other)) / 10**9


def exact(value: int | float | Decimal | Fraction) -> Number:
    """Return the value of a number by its decimal digits: 1/10 for the float 0.1."""
    if isinstance(value, int | Fraction):
        return Fraction(value)
    digits = Decimal(str(value))
    return Fraction(digits) if digits.is_finite() else float(value)


def decimal_text(value: int | float | Decimal | Fraction) -> str:
    """Write a number in full: `0.00001` for 1e-05, `5` for 5.0."""
    if isinstance(value, int | Fraction):
        return str(value)
    digits = Decimal(str(value))
    if not digits.is_finite() or abs(digits.adjusted()) > LONGEST:
        return str(value)
    text = f"{digits:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text


def spelled_out(text: str) -> str | None:
    """Return a decimal number in full (`1000` for `$1,000`, `5` for `5.0`, `0.00001` for `1e-05`); None for any other
    text, fractions and percentages included."""
    text = plain_notation(text).strip()
    plain = text.replace(",", "") if re.fullmatch(rf"[-+]?(?:{PLAIN})", text) else text
    if not re.fullmatch(rf"[-+]?(?:{PLAIN})", plain) and not SCIENTIFIC.fullmatch(plain):
        return None
    return decimal_text(Decimal(plain))


def plain_notation(text: str) -> str:
    """Return the text with ASCII signs, and without LaTeX spaces, delimiters, text commands and currencies."""
    text = text.translate(SIGNS)
    for sign, fraction in VULGAR.items():
        text = re.sub(rf"(?<=\d){sign}", f" {fraction}", text).replace(sign, fraction)
    text = SUPERSCRIPT.sub(lambda found: f"10^{found[1].translate(DIGITS)}", text)
    text = SPACES.sub(lambda found: "" if found[0] in ("\\!",) else " ", text.replace("{,}", ","))
    text = re.sub(r"(?<=\d,) (?=\d{3}(?!\d))", "", re.sub(r"(?<=\d) (?=\d{3}(?:\D|$))(?<!\d{4} )", "", text))
    while (inner := WRAPPED.sub(r" \1", text)) != text:
        text = inner
    for delimiter in ("\\(", "\\)", "\\[", "\\]", "\\left", "\\right"):
        text = text.replace(delimiter, "")
    text = CURRENCY.sub("", text)
    return POWER.sub(r"1e\1", MULTIPLIED.sub(r"e\1", text))


def _value(found: re.Match[str]) -> Number | None:
    part = found.groupdict()
    sign = -1 if (part["sign"] or "").startswith("-") else 1
    try:
        if part["whole"] is not None:
            return sign * (int(part["whole"]) + _fraction(part["top"] or part["top1"], part["under"] or part["under1"]))
        if part["mixed"] is not None:
            return sign * (int(part["mixed"]) + _fraction(part["over"], part["below"]))
        if part["number"] is not None:
            return sign * _fraction(part["number"], part["divisor"])
        if part["digits"] is None:
            return sign * _fraction(part["n"] or part["n1"], part["d"] or part["d1"])
        exponent = int(part["exponent"] or 0)
        if abs(exponent) > LONGEST:
            return None
        return sign * _fraction(part["digits"], "1") * Fraction(10) ** exponent
    except ZeroDivisionError:
        return None


def _fraction(above: str, below: str) -> Fraction:
    return Fraction(above.replace(",", "").rstrip(".") or "0") / Fraction(below.replace(",", "").rstrip(".") or "0")
