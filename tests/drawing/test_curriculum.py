"""Draws by pass rate without a server: rows that are skipped, rows that never are, and restoring from an image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.drawing.curriculum import Curriculum, Draws, coin
from asyncrl.drawing.pass_rates import STEPS, PassRates
from asyncrl.drawing.turns import Turns

WEIGHTS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def curriculum(weights: Sequence[float], **changes) -> Curriculum:
    plain = Curriculum(low=0.1, high=0.9, explore=0.2, passes_at=0.5, weights=tuple(weights), shuffle=True)
    return replace(plain, **changes)


@given(weights=WEIGHTS, index=st.integers(0, 10**7))
def test_a_turn_is_found_again_by_its_source_and_what_came_before_it(weights: list[int], index: int) -> None:
    turns = Turns(weights)
    source, before = turns[index]
    assert turns.index_of(source, before) == index
    assert turns.before(index)[source] == before and sum(turns.before(index)) == index


@given(weights=WEIGHTS, seed=st.integers(0, 2**62), start=st.integers(0, 500))
def test_with_nothing_measured_the_stream_is_that_without_a_curriculum(
    weights: list[int], seed: int, start: int
) -> None:
    draws = Draws([7] * len(weights), weights, seed=seed, shuffle=True, drawn=start)
    for turn in range(start, start + 60):
        assert draws.next(turn, curriculum(weights)) == turn == draws.next(turn, None)
        draws.take(turn)
    assert draws.passed_over == 0


@settings(max_examples=40)
@given(weights=WEIGHTS, seed=st.integers(0, 2**62), data=st.data())
def test_shares_hold_no_row_comes_twice_in_an_epoch_and_an_image_goes_on_as_what_it_was_taken_of(
    weights: list[int], seed: int, data: st.DataObject
) -> None:
    rows = [data.draw(st.integers(1, 12)) for _ in weights]
    rates = [data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n, max_size=n)) for n in rows]
    wanted, turns = curriculum(weights), Turns(weights)
    draws, restored_at = Draws(rows, weights, seed=seed, shuffle=True), data.draw(st.integers(0, 149))
    seen: dict[tuple[int, int], list[int]] = {}
    drawn: list[int] = []
    for turn in range(150):
        if turn == restored_at:
            draws = Draws.load(draws.image())
        index = draws.next(turn, wanted)
        draws.take(index)
        drawn.append(index)
        source, before = turns[index]
        row = draws._order.drawn(source, before)
        assert source == turns[turn][0]  # whose turn it is does not depend on what was passed over
        seen.setdefault((source, row.epoch), []).append(row.row)
        draws.measure(index, rates[source][row.row])
    assert len(set(drawn)) == len(drawn)
    assert all(len(set(found)) == len(found) for found in seen.values())
    assert sum(draws.positions) == len(drawn) + draws.passed_over
    again, fresh = [], Draws(rows, weights, seed=seed, shuffle=True)
    for turn in range(150):
        again.append(fresh.next(turn, wanted))
        fresh.take(again[-1])
        source, before = turns[again[-1]]
        fresh.measure(again[-1], rates[source][fresh._order.drawn(source, before).row])
    assert again == drawn and fresh.image() == draws.image()


def test_solved_and_hopeless_rows_are_drawn_less_and_never_starved() -> None:
    rates, wanted = [0.0, 0.5, 1.0], curriculum([1.0])
    draws, turns = Draws([300], [1.0], seed=3, shuffle=True), Turns([1.0])
    came: Counter[int] = Counter()
    for turn in range(6300):
        index = draws.next(turn, wanted)
        draws.take(index)
        row = draws._order.drawn(*turns[index]).row
        came[row] += turn >= 300  # the first time each comes, to be measured
        draws.measure(index, rates[row % 3])
    by_kind = [[came[row] for row in range(300) if row % 3 == kind] for kind in range(3)]
    assert min(map(min, by_kind)) >= 1  # every row came again after it was measured
    # Of three rows one is in the window: of 1.4 draws per pass over them 1 is of it.
    assert sum(by_kind[1]) / 6000 == pytest.approx(1 / 1.4, abs=0.02)
    assert sum(by_kind[0]) / sum(by_kind[2]) == pytest.approx(1, abs=0.15)


def test_a_row_that_has_become_solvable_comes_back_into_the_window() -> None:
    rates = PassRates(1)
    for _ in range(9):
        rates.measure(0, 0.0)
    assert rates[0] == 0.0
    rates.measure(0, 0.25)
    assert 0.1 < (rates[0] or 0.0) < 0.25
    for _ in range(9):
        rates.measure(0, 1.0)
    assert rates[0] == 1.0


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1)), max_size=60))
def test_what_is_said_of_all_rows_is_what_their_rates_say(measured: list[tuple[int, float]]) -> None:
    rates = PassRates(5)
    for row, rate in measured:
        rates.measure(row, rate)
    known = [rate for rate in (rates[row] for row in range(5)) if rate is not None]
    summary = rates.summary(0.1, 0.9)
    assert summary["measured"] == len(known) / 5
    if known:
        assert summary["mean"] == pytest.approx(float(np.mean(known)))
        assert summary["below"] == sum(rate < 0.1 for rate in known) / len(known)
        assert summary["above"] == sum(rate > 0.9 for rate in known) / len(known)
    assert PassRates.load(5, rates.image()).summary(0.1, 0.9) == summary


def test_a_million_rows_are_a_megabyte_and_so_is_their_image() -> None:
    draws = Draws([10**6], [1.0], seed=0, shuffle=True)
    assert draws.rates._levels.nbytes == 10**6
    draws.rates._levels[:] = np.random.default_rng(0).integers(0, 10, 10**6) * STEPS // 9
    assert len(draws.rates.image()) < 10**6
    assert len(PassRates(10**6).image()) < 10_000


def test_an_image_of_other_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="of 3 rows, not 4"):
        PassRates.load(4, PassRates(3).image())
    with pytest.raises(ValueError, match="not 2"):
        PassRates.load(2, PassRates(10**6).image())  # not even decompressed
    with pytest.raises(ValueError, match="cannot be read"):
        PassRates.load(2, b"rates")


def test_coins_are_fair_and_never_change() -> None:
    assert [round(coin(7, index), 6) for index in (0, 1, 10**12)] == COINS
    thrown = np.asarray([coin(1, index) for index in range(20_000)])
    assert thrown.min() >= 0 and thrown.max() < 1
    assert abs(thrown.mean() - 0.5) < 0.01 and abs((thrown < 0.1).mean() - 0.1) < 0.01


COINS = [0.966294, 0.700294, 0.111013]
