from __future__ import annotations

import numpy as np
import pytest

from asyncrl.autotune import rates
from asyncrl.autotune.rates import Engines, alone_for, curves, flow, speed


def engines(knee: float = 1e6, *, is_sharp: bool = True, alone: float = 1.0) -> Engines:
    """One curve that is sure."""
    one = np.ones(1)
    return Engines(knee * one, np.array([is_sharp]), alone * one, one, np.zeros(1, np.intp))


def test_few_groups_in_flight_are_as_fast_as_one_and_of_many_only_the_sum_counts() -> None:
    for is_sharp in (False, True):
        few, many, more = speed(np.array([20.0]), np.array([is_sharp]), np.array([0.1, 2000.0, 4000.0]))[0]
        assert few == pytest.approx(0.1, rel=0.01)
        assert more == pytest.approx(many, rel=0.01) == pytest.approx(20.0, rel=0.02)


@pytest.mark.parametrize("is_sharp", [False, True])
def test_the_curve_by_which_steps_were_made_is_found(is_sharp: bool) -> None:
    """Of three numbers in flight, the rate at a fourth one and how long one takes alone."""
    random = np.random.default_rng(0)
    knee, sharp = curves(64)
    true = engines(20.0, is_sharp=is_sharp, alone=3.0)
    held = [{count: 30.0} for count in (2, 20, 60) * 40]
    made = np.array([30.0 * float(true.rate(np.array([float(count)]))[0, 0]) for step in held for count in step])
    groups = made + random.normal(size=len(made)) * 0.3 * np.sqrt(made)
    alone = np.array([alone_for(knee, sharp, step) for step in held]).T
    found = Engines.fitted(knee, sharp, alone, groups, np.ones(len(held)))
    assert found.weight.sum() == pytest.approx(1.0)
    assert found.mean(found.rate(np.array([30.0])))[0] == pytest.approx(true.rate(np.array([30.0]))[0, 0], rel=0.1)
    assert float(found.weight @ found.alone) == pytest.approx(3.0, rel=0.15)


def test_of_what_was_never_in_flight_it_is_unsure() -> None:
    knee, sharp = curves(64)
    alone = np.array([alone_for(knee, sharp, {2: 30.0}) for _ in range(40)]).T
    found = Engines.fitted(knee, sharp, alone, np.full(40, 20.0), np.ones(40))
    for count, factor in ((2.0, 1.1), (64.0, 2.0)):
        low, high = (found_at[0] for found_at in found.quantiles(found.rate(np.array([count])), 0.1, 0.9))
        assert (high > factor * low) == (count == 64.0)


def test_a_learner_is_busy_with_engines_that_are_faster_and_waits_for_slower_ones() -> None:
    """Each group takes a second: 32 in flight make 32 per second."""
    depth, in_flight = np.array([8.0]), np.array([32.0])
    for learner, busy in ((16.0, 1.0), (64.0, 0.5)):
        found, flying = flow(engines(), learner, 8, depth, in_flight, 0.0)
        assert found[0, 0] == pytest.approx(busy, abs=0.01)
        assert flying[0, 0] == pytest.approx(min(learner, 32.0), rel=0.02)


def test_without_depth_the_learner_and_the_engines_take_turns() -> None:
    busy, flying = flow(engines(), 8.0, 8, np.zeros(1), np.array([64.0]), 0.0)
    assert 0.2 < busy[0, 0] < 0.5
    assert flying[0, 0] < 8.0


def test_more_room_never_makes_less() -> None:
    depth, in_flight = np.arange(9.0)[:, None], np.arange(1.0, 65.0)[None]
    busy, _ = flow(engines(20.0, is_sharp=False), 6.0, 8, depth, in_flight, 1.2)
    assert busy.shape == (1, 9, 64)
    assert np.all(np.diff(busy, axis=1) >= -1e-3) and np.all(np.diff(busy, axis=2) >= -1e-3)


def test_bounds_that_come_to_the_same_are_computed_once_and_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """More in flight than the window has room for, or a window with more room than may be in flight, is of no use."""
    knee, sharp = curves(32)
    some = Engines(knee, sharp, np.geomspace(1, 3, len(knee)), np.ones(len(knee)) / len(knee), np.arange(len(knee)))
    depth, in_flight = np.arange(20.0)[:, None], np.arange(1.0, 33.0)[None, :]
    found, computed, trained = [], [], rates.trained

    def counted(*values: rates.Array) -> tuple[rates.Array, rates.Array]:
        computed.append(values[0].size)
        return trained(*values)

    monkeypatch.setattr(rates, "trained", counted)
    for few in (0, 1 << 30):
        monkeypatch.setattr(rates, "FEW", few)
        found.append(flow(some, 2.0, 4, depth, in_flight, 0.6))
    assert computed[0] < computed[1] / 2
    for alike, each in zip(*found, strict=True):
        assert (alike == each).all() and alike.flags.c_contiguous, "sums over curves go by how they lie in memory"
