"""Learner and workers with different versions of asyncrl: each end refuses the other at once, with a message."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from asyncrl.errors import OtherVersionError, WeightsError
from asyncrl.rollout.worker.process import REFUSALS
from asyncrl.weights.broadcast import subscriber as module
from asyncrl.weights.broadcast.protocol import PROTOCOL, other_version
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.subscriber import BroadcastSubscriber
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.publishing.snapshot import BackgroundPublisher
from tests.weights.board import Board, WorkerRendezvous

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
    board = Board()
    board.announce({"weights": {"transport": "broadcast", "host": "127.0.0.1", "port": 1, "publisher": "p"}})
    if protocol is not None:
        board.announce({"weights": {"transport": "broadcast", "publisher": "p", "protocol": protocol}})
    said = refusal_of(board)
    assert f"the learner speaks version {protocol or 1} " in said and f"this worker version {PROTOCOL}" in said
    assert "Install one version on both" in said


def test_a_learner_refuses_a_worker_of_another_version_and_tells_it(monkeypatch):
    board = Board()
    publisher = BackgroundPublisher(
        BroadcastSender(board, Link(host="127.0.0.1", timeout_s=30.0), poll_members_s=0.05),
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
