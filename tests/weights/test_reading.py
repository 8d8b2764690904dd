"""Versions sent from the weights themselves: the bytes of a copy without one, and no write during a read."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.errors import WeightsError, WeightsGoneError
from asyncrl.weights.broadcast.sending import SendGroups, send
from asyncrl.weights.plan import SendPlan
from asyncrl.weights.publishing.filling import Filling
from asyncrl.weights.publishing.gather import gather_into, plan
from asyncrl.weights.publishing.reading import Reading, Rooms
from asyncrl.weights.publishing.snapshot import BackgroundPublisher, Snapshot
from tests.weights.test_snapshot import until


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


def sent_to(group: KeepingGroup, snapshot: Snapshot) -> tuple[int, list[str]]:
    plan = SendPlan.everything(snapshot.manifest, 2)
    groups = SendGroups.form(lambda *_: group, plan)  # pyright: ignore[reportArgumentType]
    with snapshot.open():
        return send(groups, snapshot, Rooms("cpu", shared=False))


def reading_of(named: list[tuple[str, torch.Tensor]], wait_s: float = 60.0) -> Reading:
    return Reading(7, dict(named), lambda work: work(), wait_s)


def snapshot_of(named: list[tuple[str, torch.Tensor]], dtype: torch.dtype, cap: int) -> Snapshot:
    filling = Filling(60.0)
    filling.end()
    manifest = plan(named, dtype, cap)
    return Snapshot(policy_version=7, manifest=manifest, buffers=[], filling=filling, reading=reading_of(named))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), piece=st.sampled_from([16, 32, 80, 1 << 20]), cap=st.sampled_from([64, 300, 1 << 20]))
def test_what_is_read_in_pieces_of_any_size_is_what_a_copy_would_be_and_has_its_fingerprints(data, piece, cap):
    shapes = data.draw(st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=5))
    named = [(f"layers.{i}.w", torch.randn(shape)) for i, shape in enumerate(shapes)]
    named += [("columns", torch.randn(6, 9)[:, 2:7]), ("ids", torch.tensor([3, 2**40])), ("last", torch.randn(3))]
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    snapshot, group = snapshot_of(named, dtype, cap), KeepingGroup(piece)
    buffers = snapshot.manifest.allocate()
    prints = gather_into(snapshot.manifest, named, buffers)
    for _ in range(2):  # as often as it takes
        group.sent = b""
        assert sent_to(group, snapshot) == (snapshot.manifest.nbytes, prints)
        assert group.sent == b"".join(bytes(buffer.tolist()) for buffer in buffers)


def test_it_takes_memory_for_two_pieces_whatever_the_model():
    named = [(f"layers.{i}.w", torch.randn(64, 257)[:, 1:]) for i in range(8)]
    manifest = plan(named, torch.bfloat16, 1 << 16)
    rooms = Rooms("cpu", shared=False)
    reading = Reading(0, dict(named), lambda work: work(), 60.0)
    with Counting() as counted, reading.open():
        rooms.reserve(1024)
        for bucket in manifest.buckets:
            for number, start in enumerate(range(0, bucket.nbytes, 1024)):
                reading.packed(bucket, start, rooms.take(number, 1024), reading.tensors)
    assert counted.nbytes <= 2 * 1024


def wrote(reading: Reading) -> threading.Thread:
    thread = threading.Thread(target=reading.wait, kwargs={"to_write": True})
    thread.start()
    return thread


def test_who_writes_waits_until_it_was_sent_once_and_then_nobody_reads_it_again():
    reading = reading_of([])
    writer = wrote(reading)
    writer.join(0.1)
    assert writer.is_alive(), "it was never sent"
    with pytest.raises(RuntimeError, match="the group broke"), reading.open():
        raise RuntimeError("the group broke")
    writer.join(0.1)
    assert writer.is_alive(), "it can be sent again"
    with reading.open():
        writer.join(0.1)
        assert writer.is_alive(), "it is being read"
    writer.join(60)
    assert not writer.is_alive() and reading.gone
    with pytest.raises(WeightsGoneError, match="no longer those of version 7"), reading.open():
        pass


def test_who_does_not_write_leaves_it_to_newcomers():
    reading = reading_of([])
    reading.give_up()
    reading.wait(to_write=False)
    with reading.open():
        writer = wrote(reading)
        writer.join(0.1)
        assert writer.is_alive()
    writer.join(60)
    assert not writer.is_alive()


def test_a_sender_that_never_ends_is_an_error_that_names_the_way_out():
    with pytest.raises(WeightsError, match=r"version 7 is still being sent .* weights.copies=two"):
        reading_of([], wait_s=0.05).wait(to_write=True)


class OpeningSender:
    """Opens a version when the test lets it, and says what it held."""

    keeps_previous, sends_buckets = False, True

    def __init__(self) -> None:
        self.go, self.seen, self.broken = threading.Semaphore(0), list[tuple[int, float]](), False

    def send(self, snapshot: Snapshot, previous: Snapshot | None = None) -> None:
        assert self.go.acquire(timeout=60)
        if self.broken:
            raise RuntimeError("no sender any more")
        group = KeepingGroup(1 << 20)
        sent_to(group, snapshot)
        (value,) = torch.frombuffer(bytearray(group.sent), dtype=torch.float32).unique().tolist()
        self.seen.append((snapshot.policy_version, value))

    def idle(self, newest: Snapshot | None) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def in_place(sender: OpeningSender) -> BackgroundPublisher:
    return BackgroundPublisher(sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=60.0, copied=False)


def test_a_publisher_without_copies_sends_every_version_as_it_was_and_lets_the_optimizer_write_between():
    sender, weight = OpeningSender(), torch.zeros(64)
    publisher = in_place(sender)
    for version in range(3):
        publisher.publish(version, [("w", weight)])
        stepping = threading.Thread(target=lambda: [list(publisher.copied()), weight.add_(1.0)])
        stepping.start()
        stepping.join(0.1)
        assert stepping.is_alive() and float(weight[0]) == version
        sender.go.release()
        stepping.join(60)
        assert not stepping.is_alive()
    until(lambda: len(sender.seen) == 3)  # the optimizer goes on a moment before the sender has written it down
    assert sender.seen == [(0, 0.0), (1, 1.0), (2, 2.0)]
    publisher.publish(3, [("w", weight)])
    assert publisher.stats()["weights/copy_wait_s"] > 0.0
    sender.go.release()
    publisher.wait_copied()
    publisher.close()


def test_a_sender_that_died_holds_no_optimizer_up():
    sender, weight = OpeningSender(), torch.zeros(64)
    publisher = in_place(sender)
    sender.broken = True
    publisher.publish(0, [("w", weight)])
    sender.go.release()
    assert list(publisher.copied()) == []
    with pytest.raises(WeightsError, match="no sender any more"):
        until(lambda: publisher.publish(1, [("w", weight)]) is None)
    publisher.close()
