"""Time in which a process did not run is nobody's silence."""

from __future__ import annotations

import itertools
import logging
import threading

import pytest
import zmq

from asyncrl.replay.codec.wire import Envelope, encode_envelope
from asyncrl.replay.net.clock import AwakeClock
from asyncrl.replay.net.keys import secure_client
from asyncrl.replay.server.router import entrance
from asyncrl.replay.server.survivors import learner_of
from asyncrl.types import NO_VERSION
from tests.replay.helpers import Clock, replay_config


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


def test_a_server_that_was_stopped_while_it_listened_for_a_learner_hears_the_one_that_spoke_meanwhile() -> None:
    body = ["learner", "rank 0", "d", NO_VERSION, ""]
    hello = encode_envelope(Envelope(run="run", verb="hello", request=1, incarnation="life", body=body))
    config = replay_config()
    with entrance(config) as way_in, zmq.Context() as context, context.socket(zmq.DEALER) as learner:
        secure_client(learner, config.keys, "learner")
        learner.connect(config.address)
        learner.send(hello)
        wall = itertools.chain((0.0, 0.0), itertools.count(100.0, 0.1))
        clock = AwakeClock(5.0, lambda: next(wall))
        found = learner_of("run", way_in, 10.0, threading.Event(), clock)
    assert found is not None and found[0].name == "rank 0"
