"""Two findings of the simulation: requests that arrive after later ones must change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import zmq

from asyncrl.errors import FencedError, ReplayError
from asyncrl.replay.client.client import LearnerClient
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.wire import Envelope
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.net.keys import secure_client
from asyncrl.settings.replay import ReplayConfig
from asyncrl.types import NO_VERSION
from tests.replay.helpers import replay_config, running_server, settings


class RawWorker:
    """Speaks frame by frame, so that it can say things twice and late."""

    def __init__(self, config: ReplayConfig) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        secure_client(self.socket, config.keys, "worker")
        self.socket.connect(config.address)
        self.run = ""

    def say(self, verb: str, number: int, body: Any, acknowledged: int = 0) -> None:
        body = body if verb == "hello" else [acknowledged, body]
        envelope = Envelope(run=self.run, verb=verb, request=number, incarnation="raw", body=body)
        self.socket.send(wire.encode_envelope(envelope))

    def hear(self, wait_s: float = 40.0) -> Envelope | None:
        return wire.decode_envelope(self.socket.recv_multipart()[0]) if self.socket.poll(int(wait_s * 1000)) else None

    def ask(self, *what: Any) -> Any:
        self.say(*what)
        answer = self.hear()
        assert answer is not None and answer.verb == "ok", answer
        return answer.body

    def close(self) -> None:
        self.context.destroy(linger=0)


def test_a_copy_of_an_answered_request_gives_no_orders_to_nobody() -> None:
    config = replay_config(heartbeat_timeout_s=20.0)
    with running_server(config, settings()):
        learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
        learner.restore(step=None, policy_version=NO_VERSION, snapshot=None)
        learner.publish(policy_version=0, parent=NO_VERSION)
        worker = RawWorker(config)
        try:
            worker.run = worker.ask("hello", 1, ["worker", "w", "d", NO_VERSION, ""])[0]
            worker.ask("served", 2, [0, "f"], 2)
            assert len(worker.ask("acquire", 3, [1, 0.0], 3)[0]) == 1
            worker.ask("watch", 4, [-1, 0.0], 4)
            worker.say("acquire", 3, [1, 0.0], 3)
            worker.say("watch", 5, [-1, 0.0], 4)
            answer = worker.hear()
            assert answer is not None and answer.request == 5, "the copy was answered"
        finally:
            worker.close()
            learner.close()


def core_with_learner() -> ReplayCore:
    core = ReplayCore(settings(), lambda: 0.0)
    core.hello_learner("rank 0", "old")
    core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="old")
    core.publish(policy_version=0, parent=NO_VERSION)
    return core


def test_a_publication_that_comes_again_after_later_ones_takes_no_version_back() -> None:
    core = core_with_learner()
    core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="old")
    core.publish(policy_version=1, parent=0)
    core.publish(policy_version=0, parent=NO_VERSION)
    assert core.state.version == 1
    with pytest.raises(ReplayError):
        core.publish(policy_version=1, parent=7)


def test_the_late_restore_of_a_dead_learner_does_not_fence_its_successor() -> None:
    core = core_with_learner()
    for incarnation in ("dead", "new"):
        core.hello_learner("rank 0", incarnation)
    with pytest.raises(FencedError):
        core.check_rank("rank 0", "dead")
    with pytest.raises(FencedError):
        core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="dead")
    with pytest.raises(FencedError):
        core.hello_learner("rank 0", "dead")
    core.check_rank("rank 0", "new")
    core.check_rank("rank 1", "other")


def test_a_learner_that_runs_goes_on_until_another_has_restored() -> None:
    core = core_with_learner()
    core.hello_learner("rank 1", "old 1")
    for new in (1, 0):  # of the second learner any rank may come first, or alone
        core.hello_learner(f"rank {new}", f"new {new}")
        for rank, incarnation in (("rank 0", "old"), ("rank 1", "old 1")):
            core.hello_learner(rank, incarnation)
            core.check_rank(rank, incarnation)
    core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="new 0")
    for rank, incarnation in (("rank 0", "old"), ("rank 1", "old 1")):
        core.check_rank(rank, f"new {rank[-1]}")
        with pytest.raises(FencedError):
            core.check_rank(rank, incarnation)
        with pytest.raises(FencedError):
            core.hello_learner(rank, incarnation)
