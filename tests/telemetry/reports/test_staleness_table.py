from __future__ import annotations

import pytest

from asyncrl.telemetry.reports.summary import staleness_table


def row(**ages: tuple[float, float, float]) -> dict[str, float]:
    """`_<age>=(share of tokens, rms log-ratio, largest ratio)`."""
    found = {}
    for age, (share, rms, largest) in ages.items():
        place = f"staleness/age{age}"
        found |= {f"{place}/token_share": share, f"{place}/rms_log_ratio": rms, f"{place}/max": largest}
    return found


def test_each_age_is_a_line_averaged_by_tokens_with_the_largest_ratio() -> None:
    rows = [row(_0=(0.5, 0.1, 2.0), _3=(0.5, 0.2, 9.0)), row(_0=(1.0, 0.4, 1.5))]
    heading, fresh, old = staleness_table(rows)
    assert heading.split()[:2] == ["age", "share"]
    assert fresh.split() == ["0", "75.0%", f"{(0.5 * 0.1 + 1.0 * 0.4) / 1.5:.4f}", "2.00"]
    assert old.split() == ["3", "25.0%", "0.2000", "9.00"]


def test_only_the_last_rows_count() -> None:
    rows = [row(_0=(0.5, 9.0, 1.0), _1=(0.5, 9.0, 1.0)), row(_0=(0.5, 0.1, 1.0), _1=(0.5, 0.2, 1.0))]
    assert "9.0" not in "".join(staleness_table(rows, last=1))


@pytest.mark.parametrize("rows", [[], [{"step": 1}], [row(_0=(1.0, 0.1, 1.0))]])
def test_without_old_tokens_there_is_nothing_to_compare(rows: list) -> None:
    assert staleness_table(rows) == []
