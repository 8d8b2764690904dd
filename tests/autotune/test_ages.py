from __future__ import annotations

import numpy as np
import pytest

from asyncrl.autotune.ages import Ages, Spread, pooled


def ages(*tokens: int, steps: float = 1.0) -> Ages:
    """Of ages 0, 1, ...; the last are those that were too old."""
    oldest = len(tokens) - 2
    return Ages(oldest, [Spread.of(oldest, dict(enumerate(tokens[:-1])), tokens[-1])], [steps])


def test_the_mean_counts_what_was_too_old_as_one_version_older_than_may_be() -> None:
    assert ages(1, 1, 2, 0).mean == pytest.approx(1.25)
    assert ages(0, 0, 0, 7).mean == 3.0
    assert ages(0, 0, 0, 0).mean == 0.0


def test_where_nothing_changes_as_much_is_wasted_as_was() -> None:
    assert ages(10, 20, 30, 40).wasted(np.ones(1), np.zeros(1)) == pytest.approx(0.4)


def test_older_tokens_are_wasted_more_and_fresher_ones_less() -> None:
    found = ages(10, 20, 30, 20, 10, 10)
    slower, same, faster = found.wasted(np.array([0.5, 1.0, 2.0]), np.zeros(3))
    assert slower < same < faster == pytest.approx(0.4)
    assert found.wasted(np.ones(1), np.ones(1)) == pytest.approx(0.2), "one version later"
    assert found.wasted(np.ones(1), -np.ones(1)) < 0.1, "one version earlier"


def test_what_is_most_like_and_was_seen_longest_says_most() -> None:
    aging, in_store = np.array([[1.0, 4.0]]), np.zeros((1, 2))
    few, many = ages(100, 0, 0, 0, 0), ages(0, 0, 0, 0, 100)
    first, last = pooled({(0, 0): few, (0, 1): many}, aging, in_store)[0]
    assert first < 0.1 < 0.9 < last
    longer = ages(0, 0, 0, 0, 100, steps=100)
    assert pooled({(0, 0): few, (0, 1): longer}, aging, in_store)[0, 0] > first
