"""Helpers for the tests of settings that are refused."""

from __future__ import annotations

import pytest

from asyncrl.config import load_config
from asyncrl.errors import ConfigError

REQUIRED = ["model.path=m", "data.path=d.jsonl", "reward.function=r.py:score", "eval.path=e.jsonl"]

Refused = list[tuple[list[str], list[str]]]
"""Pairs of what a user types and what the answer must contain: rule, value, way out."""


def names(rows: Refused) -> list[str]:
    """Return the test ids of the cases, for pytest."""
    return [" ".join(overrides)[:80] for overrides, _ in rows]


def assert_refused(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config([*REQUIRED, *overrides])
    said = str(refused.value)
    for part in parts:
        assert part in said, f"not {part!r}: {said}"
