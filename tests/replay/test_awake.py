"""Time in which a process did not run is nobody's silence."""

from __future__ import annotations

import logging

import pytest

from asyncrl.replay.awake import AwakeClock

from .helpers import Clock


def test_time_goes_on_as_long_as_somebody_asks(caplog: pytest.LogCaptureFixture) -> None:
    wall = Clock()
    awake = AwakeClock(5.0, wall)
    for _ in range(100):
        wall.now += 5.0
        assert awake() == wall.now
    assert not caplog.records


def test_of_a_standstill_no_more_counts_than_the_limit_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    wall = Clock()
    awake = AwakeClock(5.0, wall)
    wall.now = 30.0
    with caplog.at_level(logging.WARNING):
        assert awake() == 5.0
    assert "did not run for 30.0 s" in caplog.text
    wall.now = 31.0
    assert awake() == 6.0
