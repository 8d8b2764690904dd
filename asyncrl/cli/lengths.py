"""Text histogram of the lengths of rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

BAR = 40
"""Characters of the longest bar."""
BINS = 10
"""Largest number of bins for lengths within the limit."""


def histogram(
    tokens: Sequence[int], limit: int, *, of: str = "prompts", key: str = "data.max_prompt_tokens"
) -> list[str]:
    """Return a heading and one line per bin; lengths over the limit are in one bin of their own.

    Args:
        of, key: what is counted, and the name of the setting `limit`.
    """
    inside = [count for count in tokens if count <= limit]
    counts: list[tuple[str, int]] = []
    if inside:
        edges = np.unique(np.linspace(min(inside), max(inside) + 1, BINS + 1).round().astype(int)).tolist()
        bins = [(low, high - 1) for low, high in itertools.pairwise(edges)]
        counts = [(f"{low}-{high}", sum(low <= count <= high for count in inside)) for low, high in bins]
    if len(inside) < len(tokens):
        counts.append((f"> {limit}", len(tokens) - len(inside)))
    width, most = max(len(name) for name, _ in counts), max(count for _, count in counts)
    lines = [f"tokens of {len(tokens):,} {of} ({key}={limit}):"]
    return lines + [
        f"  {name:>{width}}  {'█' * -(-BAR * count // most):<{BAR}} {count:,}".rstrip() for name, count in counts
    ]
