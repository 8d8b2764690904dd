"""Versions sent out of the live parameters: the bytes of a copy without one, and no write during a read."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.errors import WeightsError, WeightsGoneError
from asyncrl.weights.broadcast.sending import IN_USE, SendGroups, send
from asyncrl.weights.plan import SendPlan
from asyncrl.weights.publishing.buffers import StagingBuffers
from asyncrl.weights.publishing.publisher import WeightPublisher
from asyncrl.weights.publishing.version import Version
from tests.waiting import until
from tests.weights.versions import buckets_of, fingerprints_of, version_of


class Counting(TorchDispatchMode):
    """Bytes of memory that operations in it take, whether they give it back or not: no less than their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self._known = 0, {0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        self._known |= {each.untyped_storage().data_ptr() for each in given}
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in self._known:
                self._known.add(each.untyped_storage().data_ptr())
                self.nbytes += each.untyped_storage().nbytes()
        return out


class KeepingGroup:
    """In the place of a `WeightGroup`: keeps what it is given, as it is when the wire is done with it."""

    timeout_s = 60.0

    def __init__(self, piece: int) -> None:
        self._piece = piece
        self.sent = b""

    def pieces(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return buffer.split(self._piece) if len(buffer) else ()

    def broadcast(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer

    def wait(self, work: torch.Tensor) -> None:
        self.sent += bytes(work.tolist())


def sent_to(group: KeepingGroup, version: Version) -> tuple[int, list[str]]:
    plan = SendPlan.everything(version.manifest, 2)
    groups = SendGroups.form(lambda *_: group, plan)  # pyright: ignore[reportArgumentType]
    with version.open() as buckets:
        return send(groups, version, buckets, "cpu", StagingBuffers("cpu", count=IN_USE))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), piece=st.sampled_from([16, 32, 80, 1 << 20]), cap=st.sampled_from([64, 300, 1 << 20]))
def test_what_is_read_in_pieces_of_any_size_is_what_a_copy_would_be_and_has_its_fingerprints(data, piece, cap):
    shapes = data.draw(st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=5))
    named = [(f"layers.{i}.w", torch.randn(shape)) for i, shape in enumerate(shapes)]
    named += [("columns", torch.randn(6, 9)[:, 2:7]), ("ids", torch.tensor([3, 2**40])), ("last", torch.randn(3))]
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    version, group = version_of(named, 7, dtype=dtype, cap=cap), KeepingGroup(piece)
    buffers = version.manifest.allocate()
    for name, view in version.manifest.views(buffers).items():
        view.copy_(dict(named)[name])
    for _ in range(2):  # as often as it takes
        group.sent = b""
        assert sent_to(group, version) == (version.manifest.nbytes, fingerprints_of(buffers))
        assert group.sent == b"".join(bytes(buffer.tolist()) for buffer in buffers)


def test_it_takes_memory_for_three_pieces_whatever_the_model():
    named = [(f"layers.{i}.w", torch.randn(64, 257)[:, 1:]) for i in range(8)]
    version = version_of(named, dtype=torch.bfloat16, cap=1 << 16)
    buffers = StagingBuffers("cpu", count=IN_USE)
    with Counting() as counted, version.open() as buckets:
        buffers.reserve(1024)
        for index, bucket in enumerate(version.manifest.buckets):
            for number, start in enumerate(range(0, bucket.nbytes, 1024)):
                buffers.fill(number, 1024, bucket, start, buckets.take(index).tensors).wait()
    assert counted.nbytes <= 3 * 1024


def wrote(version: Version) -> threading.Thread:
    thread = threading.Thread(target=version.wait, kwargs={"to_write": True})
    thread.start()
    return thread


def test_who_writes_waits_until_it_was_sent_once_and_then_nobody_reads_it_again():
    version = version_of([("w", torch.zeros(3))], 7)
    writer = wrote(version)
    writer.join(0.1)
    assert writer.is_alive(), "it was never sent"
    with pytest.raises(RuntimeError, match="the group broke"), version.open():
        raise RuntimeError("the group broke")
    writer.join(0.1)
    assert writer.is_alive(), "it can be sent again"
    with version.open():
        writer.join(0.1)
        assert writer.is_alive(), "it is being read"
    writer.join(60)
    assert not writer.is_alive() and version.gone
    with pytest.raises(WeightsGoneError, match="no longer those of version 7"), version.open():
        pass


def test_who_does_not_write_leaves_it_to_newcomers():
    version = version_of([("w", torch.zeros(3))])
    version.give_up()
    version.wait(to_write=False)
    with version.open():
        writer = wrote(version)
        writer.join(0.1)
        assert writer.is_alive()
    writer.join(60)
    assert not writer.is_alive()


def test_a_sender_that_never_ends_is_an_error_that_names_the_way_out():
    with pytest.raises(WeightsError, match=r"version 7 is still being sent .* weights.timeout_s may be raised"):
        version_of([("w", torch.zeros(3))], 7, wait_s=0.05).wait(to_write=True)


class OpeningSender:
    """Opens a version when the test lets it, and says what it held."""

    behind = False

    def __init__(self) -> None:
        self.go, self.seen, self.broken = threading.Semaphore(0), list[tuple[int, float]](), False

    def send(self, version: Version) -> None:
        assert self.go.acquire(timeout=60)
        if self.broken:
            raise RuntimeError("no sender any more")
        (value,) = buckets_of(version)[0].view(torch.float32).unique().tolist()
        self.seen.append((version.policy_version, value))

    def idle(self, newest: Version | None) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def publisher_of(sender: OpeningSender) -> WeightPublisher:
    return WeightPublisher(sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=60.0)


def test_every_version_is_sent_as_it_was_and_the_optimizer_writes_between():
    sender, weight = OpeningSender(), torch.zeros(64)
    publisher = publisher_of(sender)
    for version in range(3):
        publisher.publish(version, [("w", weight)])
        stepping = threading.Thread(target=lambda: [publisher.wait(), weight.add_(1.0)])
        stepping.start()
        stepping.join(0.1)
        assert stepping.is_alive() and float(weight[0]) == version
        sender.go.release()
        stepping.join(60)
        assert not stepping.is_alive()
    until(lambda: len(sender.seen) == 3)  # the optimizer goes on a moment before the sender has written it down
    assert sender.seen == [(0, 0.0), (1, 1.0), (2, 2.0)]
    publisher.publish(3, [("w", weight)])
    assert publisher.stats()["weights/wait_s"] > 0.0
    sender.go.release()
    publisher.wait_sent()
    publisher.close()


def test_a_sender_that_died_holds_no_optimizer_up():
    sender, weight = OpeningSender(), torch.zeros(64)
    publisher = publisher_of(sender)
    sender.broken = True
    publisher.publish(0, [("w", weight)])
    sender.go.release()
    publisher.wait()
    with pytest.raises(WeightsError, match="no sender any more"):
        until(lambda: publisher.publish(1, [("w", weight)]) is None)
    publisher.close()


def test_a_gather_that_fails_is_an_error_before_the_weights_change_and_nothing_is_sent(monkeypatch):
    sender = OpeningSender()
    publisher = publisher_of(sender)
    publisher.publish(3, [("w", torch.zeros(4))])
    assert publisher._gather is not None

    def breaks(*_):
        raise RuntimeError("rank 1 is gone")

    monkeypatch.setattr(publisher._gather, "begin", breaks)
    sender.go.release()
    for again in (publisher.wait, publisher.wait, lambda: publisher.publish(4, [("w", torch.zeros(4))])):
        with pytest.raises(WeightsError, match=r"version 3 could not be gathered .*: rank 1 is gone"):
            again()
    publisher.close()
    assert sender.seen == []
