from __future__ import annotations

from asyncrl.utils.restart_policy import WITHIN_S, Restarts


def test_so_many_restarts_are_had_in_any_hour_and_not_one_more():
    now = 0.0
    restarts = Restarts(3, clock=lambda: now)
    assert [restarts.take() for _ in range(4)] == [True, True, True, False]
    now = WITHIN_S - 1
    assert not restarts.take()
    now = WITHIN_S
    assert (restarts.recent, restarts.take(), restarts.recent) == (0, True, 1)


def test_restarts_of_before_count():
    restarts = Restarts(2, taken=[0.0, 1.0], clock=lambda: 2.0)
    assert not restarts.take()
    assert Restarts(2, taken=restarts.taken, clock=lambda: WITHIN_S).take()
    assert not Restarts(0).take()
