"""The tuner in the simulated run, around the real admission: benchmarks.autotune in small."""

from __future__ import annotations

import pytest

from benchmarks.autotune import simulated


@pytest.mark.parametrize("seed", [4, 7])
def test_from_a_bad_start_it_comes_near_the_best_fixed_setting(seed: int) -> None:
    """In 4 the learner is the slower one, in 7 the engines are."""
    shallow, deep = simulated(seed, 150)
    assert shallow["good"], shallow
    assert deep["good"], deep
    assert max(shallow["moves"], deep["moves"]) <= 10


@pytest.mark.long
@pytest.mark.slow
def test_of_many_workloads_it_does_in_nearly_all() -> None:
    rows = [row for seed in range(60) for row in simulated(seed, 250)]
    assert sum(bool(row["good"]) for row in rows) >= 0.97 * len(rows), [row for row in rows if not row["good"]]
