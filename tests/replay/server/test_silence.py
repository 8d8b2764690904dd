"""When the server takes a peer for silent: in time, and never one that has sent something."""

from __future__ import annotations

import pytest

from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.server.handlers import Handlers
from asyncrl.replay.server.sessions import TICK_S, Later, Session, silence_of
from asyncrl.settings.replay import ReplayConfig
from asyncrl.types import NO_VERSION
from tests.replay.helpers import Clock, settings

SHIPPED = ReplayConfig()


@pytest.mark.parametrize("timeout_s", [SHIPPED.heartbeat_timeout_s, 30.0, 300.0])
def test_a_tick_and_a_slow_turn_fit_between_the_silence_and_the_time_to_name_it(timeout_s: float) -> None:
    silence_s = silence_of(ReplayConfig(heartbeat_timeout_s=timeout_s))
    assert silence_s + TICK_S + 0.05 * timeout_s <= timeout_s
    assert silence_s >= 0.9 * timeout_s


def test_a_worker_that_falls_silent_while_its_request_waits_is_given_up_as_soon_as_any_other() -> None:
    clock = Clock()
    core = ReplayCore(settings(), clock, heartbeat_timeout_s=10.0)
    core.hello("w", "a")
    waiting = Handlers(core).handle(Session("worker", "w", "a", b"", 0.0), "acquire", [1, 60.0], ())
    assert isinstance(waiting, Later)
    core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="l")
    core.publish(policy_version=0, parent=NO_VERSION)
    clock.now = 9.0
    assert core.has_work() and waiting.retry() is None, "it serves no weights"
    waiting.at_deadline()
    clock.now = 10.1
    assert core.expire() == ["w"]


def test_a_worker_that_says_anything_lives_on() -> None:
    clock = Clock()
    core = ReplayCore(settings(), clock, heartbeat_timeout_s=10.0)
    core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="l")
    core.publish(policy_version=0, parent=NO_VERSION)
    core.hello("w", "a")
    for say in (
        lambda: core.heartbeat("w", "a", {}),
        lambda: core.served("w", "a", 0, "f"),
        lambda: core.hello("w", "a"),
    ):
        clock.now += 9.0
        say()
        assert core.expire() == []
