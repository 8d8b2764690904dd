"""Writes a setting's value as the right-hand side of `key=value` in Hydra's syntax."""

from __future__ import annotations

import re
from typing import Any

_PLAIN = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-:"


def quoted(value: str) -> str:
    """Quote a text for the right-hand side of an override: Hydra's grammar uses commas, spaces and brackets."""
    if value and not set(value) - set(_PLAIN):
        return value
    kept = re.sub(r"(\\*)'", r"\1\1\\'", value)  # backslashes are literal except before a quote
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", kept) + "'"


def written(value: Any) -> str:
    """Write any setting's value as the right-hand side of an override."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{written(part)}" for name, part in value.items()) + "}"
    if not isinstance(value, str):
        return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
    reads_as_another = re.fullmatch(r"null|true|false|[-+]?(inf|nan|[\d._]+(e[-+]?\d+)?)", value.lower())
    return f"'{value}'" if reads_as_another else quoted(value)
