"""An epoch that forms for some of its members and not for others."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from asyncrl.weights.broadcast import publisher as publisher_module
from asyncrl.weights.broadcast import stream_wire
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.subscriber import BroadcastSubscriber
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.publishing.snapshot import BackgroundPublisher
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
    publisher = BackgroundPublisher(sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=WAIT_S)
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
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusing: list[Any]
) -> None:
    """Before, each epoch broke for it, and no worker got any version."""
    connect = stream_wire._connect
    broken = threading.Event()
    broken.set()

    def second_fails(store: Any, seat: int, where: Any, deadline: float) -> Any:
        return connect(store, seat, refusing if seat == 2 and broken.is_set() else where, deadline)

    monkeypatch.setattr(stream_wire, "_connect", second_fails)
    meeting = Meeting(2)
    sender = BroadcastSender(meeting, Link(host="127.0.0.1", timeout_s=TIMEOUT_S), poll_members_s=0.1)
    publisher = BackgroundPublisher(sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=WAIT_S)
    members = [
        BroadcastSubscriber(meeting, lambda *_: None, worker=f"w{number}", incarnation="1", timeout_s=TIMEOUT_S)
        for number in range(2)
    ]

    def served_by(engines: int, version: int) -> bool:
        found = publisher.stats()
        return (found.get("weights/engines"), found["weights/sent_version"]) == (engines, version)

    try:
        publisher.publish(0, [("w", WEIGHT)])
        until(lambda: "w1 has no connection" in caplog.text, "nobody said why", within_s=WAIT_S)
        until(lambda: "is left out for 2 s" in caplog.text, "it was not left out", within_s=WAIT_S)
        until(lambda: served_by(1, 0), "the other worker waits for it", within_s=WAIT_S)
        broken.clear()
        until(lambda: served_by(2, 0), "it is left out for ever", within_s=WAIT_S)
        publisher.publish(1, [("w", WEIGHT)])
        until(lambda: served_by(2, 1), "no version after it", within_s=WAIT_S)
    finally:
        publisher.close()
        for member in members:
            member.close()
