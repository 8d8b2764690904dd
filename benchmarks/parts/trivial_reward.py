"""A minimal reward."""

from __future__ import annotations

from typing import Any


def length(completion: str, row: dict[str, Any]) -> float:
    return float(len(completion))
