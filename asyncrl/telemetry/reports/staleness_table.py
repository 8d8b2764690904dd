"""A table of how far the policy moved from the data, by the age of the token: at which age does data stop helping?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = (
    ("share", "token_share", "{:.1%}"),
    ("rms log-ratio", "rms_log_ratio", "{:.4f}"),
    ("ESS/N", "ess_token", "{:.3f}"),
    ("KL(mu|pi)", "kl_k3", "{:.5f}"),
    ("clipped", "clip_fraction", "{:.2%}"),
    ("max ratio", "max", "{:.2f}"),
)
"""Heading, metric `staleness/age_<k>/...` and number format of each column."""
AGE = re.compile(r"staleness/age_(\d+)/token_share")


def staleness_table(rows: Sequence[Mapping[str, Any]], last: int = 50) -> list[str]:
    """Return lines of text, one per token age, averaged by tokens over the last rows (for the maximum, the largest).

    Args:
        rows: rows of metrics.jsonl.
        last: number of the last rows used: the policy at the end is what the next run starts from.

    Returns:
        No lines if 0 is the only age, since there is nothing to compare.
    """
    recent = rows[-last:]
    ages = sorted({int(found.group(1)) for row in recent for name in row if (found := AGE.fullmatch(name))})
    if not ages or ages == [0]:
        return []
    widths = [max(len(heading), 8) for heading, _, _ in COLUMNS]
    lines = [
        "  age  " + "  ".join(heading.rjust(width) for (heading, _, _), width in zip(COLUMNS, widths, strict=True))
    ]
    for age in ages:
        cells = (_cell(recent, age, metric, form) for _, metric, form in COLUMNS)
        lines.append(f"{age:5d}  " + "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
    return lines


def _cell(rows: Sequence[Mapping[str, Any]], age: int, metric: str, form: str) -> str:
    place = f"staleness/age_{age}"
    if metric == "token_share":
        return form.format(sum(row.get(f"{place}/token_share") or 0.0 for row in rows) / len(rows))
    found = [
        (row[f"{place}/{metric}"], row[f"{place}/token_share"])
        for row in rows
        if row.get(f"{place}/{metric}") is not None and row.get(f"{place}/token_share")
    ]
    if not found:
        return ""
    if metric == "max":
        return form.format(max(value for value, _ in found))
    return form.format(sum(value * share for value, share in found) / sum(share for _, share in found))
