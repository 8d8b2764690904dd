"""Which time is charged to whom while a version is gathered and sent, with a clock that only the gather moves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from asyncrl.weights.broadcast import publisher as broadcast_publisher
from asyncrl.weights.broadcast import sending
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.sending import IN_USE, SendGroups, send
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.plan import SendPlan
from asyncrl.weights.publishing.buffers import StagingBuffers
from asyncrl.weights.publishing.gather import BucketContents
from tests.weights.board import Board
from tests.weights.versions import version_of

TIMEOUT_S = 4.0


class Clock:
    """In place of `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SlowBuckets:
    """Each new bucket is there after `rest_s`; the first is there at once."""

    def __init__(self, clock: Clock, rest_s: float) -> None:
        self._clock, self._rest_s, self._seen = clock, rest_s, 0

    def take(self, index: int) -> BucketContents:
        if index > self._seen:
            self._clock.now += self._rest_s
            self._seen = index
        return BucketContents(tensors={f"layers.{index}.w": torch.zeros(4)})


class Wire:
    """A group whose wire takes no time, in pieces of 16 bytes."""

    timeout_s = TIMEOUT_S
    world = 2

    def pieces(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from buffer.split(16)

    def broadcast(self, buffer: torch.Tensor) -> None: ...

    def wait(self, work: None) -> None: ...

    def abort(self) -> None: ...


def sent_to(group: Wire, buckets: SlowBuckets) -> int:
    version = version_of([(f"layers.{i}.w", torch.zeros(4)) for i in range(2)], cap=16)
    groups = SendGroups.form(lambda *_: group, SendPlan.everything(version.manifest, 2))  # pyright: ignore
    return send(groups, version, buckets, "cpu", StagingBuffers("cpu", count=IN_USE))[0]  # pyright: ignore


def test_a_gather_that_stands_still_is_named_and_no_subscriber_is_blamed():
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(sending, "time", clock)
        assert sent_to(Wire(), SlowBuckets(clock, TIMEOUT_S / 3)) == 32
        with pytest.raises(RuntimeError, match=r"the gather of the learner's weights stood still for 4\.0 s"):
            sent_to(Wire(), SlowBuckets(clock, TIMEOUT_S))


class LateWire(Wire):
    """Its second piece comes too late, whoever that is due to."""

    def wait(self, work: None) -> None:
        raise RuntimeError("one of its 1 subscribers is silent or too slow")


@pytest.mark.parametrize(("rest_s", "blamed"), [(0.75 * TIMEOUT_S, "the gather of the learner"), (0.5, "^one of its")])
def test_whoever_used_up_the_time_is_named_when_bytes_do_not_come_through(monkeypatch, rest_s, blamed):
    clock = Clock()
    monkeypatch.setattr(sending, "time", clock)
    with pytest.raises(RuntimeError, match=blamed):
        sent_to(LateWire(), SlowBuckets(clock, rest_s))


def test_a_group_that_cannot_be_formed_is_tried_ever_later(monkeypatch):
    """Where a wrong interface keeps it from ever being, its members are not asked fifty times a second."""
    clock, peers, tried = Clock(), {("a", "1"): 0}, []

    def breaks(*_):
        tried.append(clock.now)
        raise RuntimeError("10 vs 2")

    sender = BroadcastSender(Board(), Link(host="127.0.0.1", timeout_s=TIMEOUT_S))  # pyright: ignore
    monkeypatch.setattr(broadcast_publisher, "time", clock)
    monkeypatch.setattr(broadcast_publisher, "fetch", lambda *_: {"width": 1, "wanted": []})
    monkeypatch.setattr(SendGroups, "form", breaks)
    monkeypatch.setattr(sender, "_invite", lambda *_: list(peers))
    for name, found in {"live": list(peers), "waiting": list(peers)}.items():
        monkeypatch.setattr(sender._door, name, lambda *_, found=found: found)
    monkeypatch.setattr(sender._door, "come", lambda _: list(peers) if len(tried) < 20 else [])
    assert not sender._form(version_of([("w", torch.zeros(8))]))
    waits = [round(late - early, 6) for early, late in itertools.pairwise(tried)]
    assert len(tried) == 20 and max(waits[:3]) < 0.05, "who died is soon done without"
    assert waits == sorted(waits) and waits[-1] == 1.0
    sender.close()
