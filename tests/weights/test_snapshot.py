from __future__ import annotations

import threading

import pytest
import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.fingerprint import bucket_fingerprint
from asyncrl.weights.publishing import snapshot
from asyncrl.weights.publishing.snapshot import BackgroundPublisher, Snapshot
from tests.waiting import until


class HeldSender:
    """Sends one version at a time, each for as long as the test holds it."""

    def __init__(self, keeps_previous: bool = False, sends_buckets: bool = True) -> None:
        self.keeps_previous, self.sends_buckets = keeps_previous, sends_buckets
        self.started: list[int] = []
        self.seen: list[tuple[float | None, float | None]] = []
        self.snapshots: list[Snapshot] = []
        self.go = threading.Semaphore(0)

    def send(self, snapshot: Snapshot, previous: Snapshot | None = None) -> None:
        snapshot.filling.wait()
        self.snapshots.append(snapshot)
        self.started.append(snapshot.policy_version)
        assert self.go.acquire(timeout=60)
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


def make(sender: HeldSender, wait_s: float = 60.0) -> BackgroundPublisher:
    return BackgroundPublisher(sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=wait_s)


def publish(publisher: BackgroundPublisher, version: int) -> float:
    return publisher.publish(version, [("w", torch.full((64,), float(version)))]).wait_previous_s


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
    third.join(30)
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


class FollowingSender(HeldSender):
    """Begins with the first bytes."""

    def send(self, snapshot: Snapshot, previous: Snapshot | None = None) -> None:
        snapshot.filling.wait(16)
        self.started.append(snapshot.policy_version)
        super().send(snapshot, previous)


class HeldCopy:
    """In place of `gather_into`: copies when it is told to, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failure: str = "") -> None:
        self.go = threading.Event()
        self.failure = failure
        self.real = snapshot.gather_into
        monkeypatch.setattr(snapshot, "gather_into", self)

    def __call__(self, *args):
        assert self.go.wait(60)
        if self.failure:
            raise RuntimeError(self.failure)
        return self.real(*args)


def test_training_goes_on_beside_the_copy_and_only_a_write_to_the_weights_waits_for_it(monkeypatch):
    sender, copy = HeldSender(), HeldCopy(monkeypatch)
    publisher, weight = make(sender), torch.zeros(64)
    publisher.publish(0, [("w", weight)])

    def step() -> None:
        publisher.wait_copied()
        weight.add_(1.0)

    writer = threading.Thread(target=step)
    writer.start()
    writer.join(0.2)
    assert writer.is_alive() and float(weight.max()) == 0.0 and sender.started == []
    copy.go.set()
    writer.join(30)
    assert not writer.is_alive()
    sender.go.release()
    until(lambda: sender.seen == [(0.0, None)])
    publisher.publish(1, [("w", weight)])
    assert publisher.stats()["weights/copy_wait_s"] > 0.0, "what the step waited for the copy before"
    publisher.wait_copied()
    sender.go.release()
    publisher.close()


def test_a_sender_may_begin_while_the_rest_is_copied(monkeypatch):
    def copy(manifest, named, buffers, group, filling, hashed) -> list[str]:
        filling.reach(16)
        until(lambda: sender.started == [0])
        return real(manifest, named, buffers, group, filling, hashed)

    sender, real = FollowingSender(), snapshot.gather_into
    monkeypatch.setattr(snapshot, "gather_into", copy)
    publisher = make(sender)
    publish(publisher, 0)
    publisher.wait_copied()
    sender.go.release()
    until(lambda: sender.seen == [(0.0, None)])
    publisher.close()


def test_a_copy_that_fails_is_an_error_before_the_weights_change_and_nothing_is_sent(monkeypatch):
    sender, copy = HeldSender(), HeldCopy(monkeypatch, failure="rank 1 is gone")
    publisher = make(sender)
    publish(publisher, 3)
    copy.go.set()
    for again in (publisher.wait_copied, publisher.wait_copied, lambda: publish(publisher, 4)):
        with pytest.raises(WeightsError, match="version 3 could not be copied out of the learner: rank 1 is gone"):
            again()
    publisher.close()
    assert sender.started == []


def test_a_copy_that_never_ends_is_an_error_that_names_the_version_and_no_hang(monkeypatch):
    copy, sender = HeldCopy(monkeypatch), HeldSender()
    monkeypatch.setattr(snapshot, "_GATHER_S", 0.1)
    publisher = make(sender, wait_s=0.1)
    publish(publisher, 5)
    with pytest.raises(WeightsError, match="version 5 is still being copied out of the learner after"):
        publisher.wait_copied()
    copy.go.set()
    sender.go.release()
    publisher.close()


def test_closing_over_a_copy_that_hangs_ends_the_sender_that_follows_it(monkeypatch):
    copy, sender = HeldCopy(monkeypatch), FollowingSender()
    monkeypatch.setattr(snapshot, "_GATHER_S", 0.1)
    publisher = make(sender)
    publish(publisher, 5)
    publisher.close()
    assert not publisher._thread.is_alive(), "still waiting for the copy"
    copy.go.set()
    publisher.wait_copied()
    assert sender.started == []


def test_of_who_sends_no_whole_buckets_fingerprints_are_taken_when_they_are_asked_for():
    """The groups may have changed while it was copied."""
    sender = HeldSender(sends_buckets=False)
    publisher = make(sender)
    publish(publisher, 0)
    until(lambda: sender.started == [0])
    (sent,) = sender.snapshots
    assert sent.fingerprints == []
    assert sent.all_fingerprints() == [bucket_fingerprint(buffer) for buffer in sent.buffers]
    sender.go.release()
    publisher.close()


def test_fingerprints_taken_while_copying_are_those_of_the_whole_buckets():
    sender = HeldSender()
    publisher = BackgroundPublisher(sender, wire_dtype=torch.bfloat16, bucket_bytes=4 << 20, wait_s=60.0)
    torch.manual_seed(0)
    tensors = {"layers.0.w": torch.randn(1_500_003), "layers.0.b": torch.randn(7), "layers.1.w": torch.randn(900, 1001)}
    tensors |= {"layers.1.s": torch.tensor(3.0), "steps": torch.tensor([3, 2**40]), "none": torch.zeros(0)}
    publisher.publish(0, tensors.items())
    until(lambda: sender.started == [0])
    (sent,) = sender.snapshots
    assert len(sent.buffers) == 2
    assert sent.fingerprints == [bucket_fingerprint(buffer) for buffer in sent.buffers]
    for name, tensor in sent.manifest.views(sent.buffers).items():
        whole = tensors[name]
        assert torch.equal(tensor, whole.to(torch.bfloat16) if whole.is_floating_point() else whole)
    sender.go.release()
    publisher.close()
