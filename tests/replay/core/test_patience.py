"""The learner's patience ends when the rollouts are silent, not when a group takes long; and it names who is silent."""

from __future__ import annotations

import pytest

from asyncrl.errors import NoProgress
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.core.live.workers import KEPT
from asyncrl.replay.core.requests.fair_share import MOST_NAMED
from asyncrl.replay.server.handlers import Handlers
from asyncrl.replay.server.sessions import Later, Session
from asyncrl.types import NO_VERSION
from tests.replay.helpers import Clock, settings

PATIENCE_S = 300.0


class Stage:
    """A learner whose lease waits at a desk for two workers that hold one group each."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.core = ReplayCore(settings(), self.clock, heartbeat_timeout_s=1e9)
        self.core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="l")
        self.core.publish(policy_version=0, parent=NO_VERSION)
        for name in ("one", "two"):
            self.core.hello(name, name)
            self.core.served(name, name, 0, "f")
            assert self.core.acquire(name, name, 1).assignments
        self.learner = Session("learner", "0", "l", b"", 0.0)
        self.waiting = Handlers(self.core).handle(self.learner, "lease", [0, 0, 1, PATIENCE_S, 0], ())

    def beat(self, name: str, **stats: float) -> None:
        self.core.heartbeat(name, name, stats)

    def patience_ends(self) -> None:
        """Raises NoProgress when it is not granted anew."""
        assert isinstance(self.waiting, Later)
        self.clock.now += self.waiting.wait_s
        again = self.waiting.at_deadline()
        assert isinstance(again, Later)
        self.waiting = again


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_first_group_may_take_longer_than_the_patience_while_tokens_flow(name: str) -> None:
    stage = Stage()
    for beat in range(1, 8):
        stage.beat("one", progress=0.0, generated_tokens=0.0)
        stage.beat(name, progress=1000.0 * beat, generated_tokens=1000.0 * beat)
        stage.patience_ends()


def test_silence_ends_the_wait_and_names_who_is_silent_since_when() -> None:
    stage = Stage()
    stage.beat("two", progress=10.0)
    stage.patience_ends()
    stage.clock.now += 7.0
    for name in ("one", "two"):  # alive, and no token
        stage.beat(name, progress=10.0 if name == "two" else 0.0, waiting_s=3.0)
    with pytest.raises(NoProgress, match=r"no group and no token for 300\.0 s.*: one for 607 s, two for 607 s"):
        stage.patience_ends()
    stage.beat("one", progress=1.0)
    assert stage.core.explain(0).endswith("two for 607 s, one for 0 s")


def test_of_a_thousand_silent_workers_a_few_are_named() -> None:
    stage = Stage()
    for number in range(1000):
        stage.core.hello(f"w{number}", "i")
    said = stage.core.explain(0).rpartition("environment step: ")[2]
    assert said.endswith(f"{1002 - MOST_NAMED} others for 0 s or less") and len(said) < 400


def test_a_worker_that_invents_statistics_fills_no_memory() -> None:
    stage = Stage()
    for beat in range(100):
        stage.core.heartbeat("one", "one", {f"invented{beat}.{n}": 1.0 for n in range(100)} | {"waiting_s": 2.0})
    stage.core.goodbye("one", "one")
    workers = stage.core.workers
    assert workers.total("waiting_s") == 2.0
    assert set(workers._past_stats) <= set(KEPT) and all(set(w.stats) <= set(KEPT) for w in workers.live.values())
