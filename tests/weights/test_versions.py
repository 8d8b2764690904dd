"""Learner and workers with different versions of asyncrl: each end refuses the other at once, with a message."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from asyncrl.errors import OtherVersionError, WeightsError
from asyncrl.rollout.worker.process import REFUSALS
from asyncrl.weights.broadcast import subscriber as module
from asyncrl.weights.broadcast.group import host_store
from asyncrl.weights.broadcast.protocol import PROTOCOL, other_version
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.subscriber import BroadcastSubscriber
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.publishing.publisher import WeightPublisher
from tests.waiting import until
from tests.weights.board import Board, WorkerRendezvous

HOST = "127.0.0.1"
pytestmark = pytest.mark.timeout(300)


def refusal_of(board: Board, meanwhile: Callable[[], object] = lambda: None) -> str:
    """What the worker says; it stops by itself."""
    board.join("w0", "1")
    worker = BroadcastSubscriber(
        WorkerRendezvous(board, "w0"), lambda version, tensors: None, worker="w0", incarnation="1", timeout_s=30.0
    )
    deadline = time.monotonic() + 200
    try:
        while time.monotonic() < deadline:
            try:
                worker.check()
            except WeightsError as error:
                assert isinstance(error, OtherVersionError) and isinstance(error, REFUSALS)
                return str(error)
            meanwhile()
            time.sleep(0.01)
    finally:
        worker.close()
    raise AssertionError("the worker goes on")


@pytest.mark.parametrize("protocol", [None, PROTOCOL + 1])
def test_a_worker_refuses_a_learner_of_another_version(protocol):
    board, (_store, port) = Board(), host_store(HOST, 30.0)
    told = {"transport": "broadcast", "host": HOST, "port": port, "publisher": "p"}
    board.announce({"weights": told | ({"protocol": protocol} if protocol is not None else {})})
    said = refusal_of(board)
    assert f"the learner speaks version {protocol or 1} " in said and f"this worker version {PROTOCOL}" in said
    assert "Install one version on both" in said


@pytest.mark.parametrize("before", [{"protocol": PROTOCOL - 1}, {"protocol": PROTOCOL, "machine": "before a reboot"}])
def test_what_a_learner_announced_that_is_gone_ends_no_worker_of_the_run_that_continues(before):
    """The replay server restores the board from its journal: the pool took it for a learner's, and gave up."""
    board, (gone, port) = Board(), host_store(HOST, 30.0)
    del gone
    board.announce({"weights": {"transport": "broadcast", "host": HOST, "port": port, "publisher": "p"} | before})
    board.join("w0", "1")
    worker = BroadcastSubscriber(
        WorkerRendezvous(board, "w0"), lambda *_: None, worker="w0", incarnation="1", timeout_s=30.0
    )
    publisher = None
    try:
        lost = "weights/lost_publisher"
        until(lambda: worker.stats()[lost], "it did not look for the learner", holds=lambda: worker._failure is None)
        publisher = WeightPublisher(
            BroadcastSender(board, Link(host=HOST, timeout_s=30.0), poll_members_s=0.05),
            wire_dtype=torch.float32, bucket_bytes=1 << 12, wait_s=120.0,
        )  # fmt: skip
        publisher.publish(0, [("w", torch.zeros(3))])
        until(lambda: worker.policy_version == 0, "it does not follow the next learner")
        worker.check()
    finally:
        worker.close()
        if publisher is not None:
            publisher.close()


def test_a_learner_refuses_a_worker_of_another_version_and_tells_it(monkeypatch):
    board = Board()
    publisher = WeightPublisher(
        BroadcastSender(board, Link(host=HOST, timeout_s=30.0), poll_members_s=0.05),
        wire_dtype=torch.float32, bucket_bytes=1 << 12, wait_s=120.0,
    )  # fmt: skip
    try:
        publisher.publish(0, [("w", torch.zeros(3))])
        monkeypatch.setattr(module, "PROTOCOL", PROTOCOL - 1)
        monkeypatch.setattr(module, "other_version", lambda *_: "")
        said = refusal_of(board)
        assert f"w0 speaks version {PROTOCOL - 1} " in said and f"the learner version {PROTOCOL}" in said
        assert publisher.stats()["weights/refused"] == 1
    finally:
        publisher.close()


def test_one_version_is_one():
    assert other_version("the learner", "w0", PROTOCOL) == ""
