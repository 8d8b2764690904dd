from __future__ import annotations

import threading
import time

import pytest
import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.snapshot import BackgroundPublisher, Snapshot


class HeldSender:
    """Sends one version at a time, each for as long as the test holds it."""

    def __init__(self, keeps_previous: bool = False) -> None:
        self.keeps_previous = keeps_previous
        self.started: list[int] = []
        self.seen: list[tuple[float, float | None]] = []
        self.go = threading.Semaphore(0)

    def send(self, snapshot: Snapshot, previous: Snapshot | None = None) -> None:
        self.started.append(snapshot.policy_version)
        assert self.go.acquire(timeout=20)
        self.seen.append((value_of(snapshot), value_of(previous)))

    def idle(self, newest: Snapshot | None) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def value_of(snapshot: Snapshot | None) -> float | None:
    """The number that every element has."""
    if snapshot is None:
        return None
    (value,) = snapshot.manifest.views(snapshot.buffers)["w"].unique().tolist()
    return value


def make(sender: HeldSender, wait_s: float = 20.0) -> BackgroundPublisher:
    return BackgroundPublisher(sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=wait_s)


def publish(publisher: BackgroundPublisher, version: int) -> float:
    return publisher.publish(version, [("w", torch.full((64,), float(version)))]).wait_previous_s


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_next_version_is_taken_while_one_is_sent_and_only_the_one_after_waits():
    sender = HeldSender()
    publisher = make(sender)
    publish(publisher, 0)
    until(lambda: sender.started == [0])
    publish(publisher, 1)
    assert sender.started == [0], "version 1 was taken while 0 was on its way"
    third = threading.Thread(target=publish, args=(publisher, 2))
    third.start()
    third.join(0.2)
    assert third.is_alive(), "two versions are on their way already"
    for _ in range(3):
        sender.go.release()
    third.join(10)
    assert not third.is_alive()
    until(lambda: len(sender.seen) == 3)
    assert sender.seen == [(0.0, None), (1.0, None), (2.0, None)], "what is sent is never written to"
    publisher.close()


def test_a_sender_that_asks_for_it_sees_the_version_before_untouched():
    sender = HeldSender(keeps_previous=True)
    publisher = make(sender)
    publish(publisher, 0)
    until(lambda: sender.started == [0])
    publish(publisher, 1)
    sender.go.release()
    until(lambda: sender.started == [0, 1])
    publish(publisher, 2)
    for _ in range(2):
        sender.go.release()
    until(lambda: len(sender.seen) == 3)
    assert sender.seen == [(0.0, None), (1.0, 0.0), (2.0, 1.0)]
    publisher.close()


def test_a_sender_that_never_ends_is_an_error_of_the_third_publication_and_no_hang():
    sender = HeldSender()
    publisher = make(sender, wait_s=0.3)
    publish(publisher, 0)
    until(lambda: sender.started == [0])
    publish(publisher, 1)
    with pytest.raises(WeightsError, match=r"version 2 cannot be published: the sender is still busy with version 0"):
        publish(publisher, 2)
    for _ in range(3):
        sender.go.release()
    publisher.close()
