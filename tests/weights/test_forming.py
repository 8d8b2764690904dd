"""An epoch that forms for some of its members and not for others."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from asyncrl.weights.broadcast import publisher as publisher_module
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.staging import Seat
from asyncrl.weights.broadcast.stream_wire import StreamWire
from asyncrl.weights.broadcast.subscriber import BroadcastSubscriber
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.publishing.publisher import WeightPublisher
from benchmarks.parts.crowd import WEIGHT, Meeting, NoBytes, Receives
from tests.waiting import until

TIMEOUT_S = 20.0
WAIT_S = 60.0


class BrokenOnce(NoBytes):
    """The publisher's end, which does not form in the first epoch. That of the members always does."""

    def __init__(self, store: Any, link: Link, **settings: Any) -> None:
        super().__init__(store, link, **settings)
        if self.epoch == 1:
            raise RuntimeError("waited 20.0 s for nccl to form: a member is gone or silent")


def test_members_for_which_an_epoch_formed_join_the_next_one_where_it_did_not_form_for_the_publisher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher_module, "WeightGroup", BrokenOnce)
    meeting = Meeting(2)
    sender = BroadcastSender(meeting, Link(host="127.0.0.1", timeout_s=TIMEOUT_S))
    publisher = WeightPublisher(sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=WAIT_S)
    members = [
        BroadcastSubscriber(
            meeting, lambda *_: None, worker=f"w{number}", incarnation="1", timeout_s=TIMEOUT_S, receiver=Receives()
        )
        for number in range(2)
    ]
    try:
        publisher.publish(0, [("w", WEIGHT)])
        # One of them may come too late for the second epoch, and have the version of the third.
        until(
            lambda: publisher.stats().get("weights/engines") == 2,
            "they wait in the epoch that was given up",
            within_s=WAIT_S,
        )
        assert publisher.stats()["weights/sent_version"] == 0
        assert sender._epoch >= 2
    finally:
        publisher.close()
        for member in members:
            member.close()


def test_a_worker_without_a_connection_to_another_is_left_out_and_comes_back_when_it_has_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, each epoch broke for it, and no worker got any version."""
    connect = StreamWire._connect
    broken = threading.Event()
    broken.set()

    def second_fails(wire: StreamWire, rank: int) -> Any:
        if wire._seat == 2 and broken.is_set():
            raise OSError(f"127.0.0.1:{rank} (Connection refused)")
        return connect(wire, rank)

    monkeypatch.setattr(StreamWire, "_connect", second_fails)
    meeting = Meeting(2)
    sender = BroadcastSender(meeting, Link(host="127.0.0.1", timeout_s=TIMEOUT_S), poll_members_s=0.1)
    publisher = WeightPublisher(sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=WAIT_S)
    members = [
        BroadcastSubscriber(meeting, lambda *_: None, worker=f"w{number}", incarnation="1", timeout_s=TIMEOUT_S)
        for number in range(2)
    ]

    def served_by(engines: int, version: int) -> bool:
        found = publisher.stats()
        return (found.get("weights/engines"), found["weights/sent_version"]) == (engines, version)

    try:
        publisher.publish(0, [("w", WEIGHT)])
        until(lambda: "w1 is left out for 2 s: it has no connection" in caplog.text, "nobody said why", within_s=WAIT_S)
        until(lambda: served_by(1, 0), "the other worker waits for it", within_s=WAIT_S)
        broken.clear()
        until(lambda: served_by(2, 0), "it is left out for ever", within_s=WAIT_S)
        publisher.publish(1, [("w", WEIGHT)])
        until(lambda: served_by(2, 1), "no version after it", within_s=WAIT_S)
    finally:
        publisher.close()
        for member in members:
            member.close()


class Dies(Receives):
    """Accepts, and never joins: its worker has been killed, which the replay server notices a little later."""

    def __init__(self, meeting: Meeting, worker: str, over: threading.Event) -> None:
        self._meeting, self._worker, self._over = meeting, worker, over

    def join(self, seat: Seat) -> None:
        time.sleep(1.0)
        self._meeting._members = [member for member in self._meeting._members if member.worker != self._worker]
        self._over.wait(2 * WAIT_S)
        raise RuntimeError("the end of the test")


@pytest.mark.parametrize(("backend", "dying"), [("sockets", 0), ("sockets", 1), ("sockets", 2), ("ipc", 1)])
def test_a_member_that_dies_before_it_joins_is_waited_for_only_until_the_replay_server_notices(
    backend: str, dying: int, caplog: pytest.LogCaptureFixture
) -> None:
    meeting, over = Meeting(3), threading.Event()
    sender = BroadcastSender(meeting, Link(host="127.0.0.1", timeout_s=TIMEOUT_S, backend=backend), poll_members_s=0.1)
    publisher = WeightPublisher(sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=WAIT_S)
    members = [
        BroadcastSubscriber(
            meeting, lambda *_: None, worker=f"w{number}", incarnation="1", timeout_s=TIMEOUT_S,
            receiver=Dies(meeting, f"w{number}", over) if number == dying else None,
        )
        for number in range(3)
    ]  # fmt: skip
    time.sleep(0.5)  # so that all are in the first epoch
    try:
        began = time.monotonic()
        publisher.publish(0, [("w", WEIGHT)])
        until(lambda: publisher.stats().get("weights/engines") == 2, "they wait for the dead one", within_s=WAIT_S)
        assert time.monotonic() - began < TIMEOUT_S / 2
        assert f"w{dying} died before it had joined" in caplog.text
    finally:
        over.set()
        publisher.close()
        for member in members:
            member.close()
