"""Which time is charged to whom while a version is copied and sent, with a clock that only the copy moves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from asyncrl.weights.broadcast import publisher as broadcast_publisher
from asyncrl.weights.broadcast import sending
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.sending import SendGroups, send
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.plan import SendPlan
from asyncrl.weights.publishing.filling import Filling
from asyncrl.weights.publishing.gather import plan
from asyncrl.weights.publishing.reading import Rooms
from asyncrl.weights.publishing.snapshot import Snapshot
from tests.weights.board import Board

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


class SlowFilling(Filling):
    """Each new byte count is there after `rest_s`; the first bytes are there at once."""

    def __init__(self, clock: Clock, rest_s: float) -> None:
        super().__init__(60.0)
        self._clock, self._rest_s, self._seen = clock, rest_s, 1

    def wait(self, nbytes: int | None = None) -> None:
        if nbytes is None or nbytes > self._seen:
            self._clock.now += self._rest_s
            self._seen = nbytes or self._seen


class Wire:
    """A group whose wire takes no time, in pieces of 16 bytes."""

    timeout_s = TIMEOUT_S
    world = 2

    def pieces(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from buffer.split(16)

    def broadcast(self, buffer: torch.Tensor) -> None: ...

    def wait(self, work: None) -> None: ...

    def abort(self) -> None: ...


def snapshot_of(version: int, filling: Filling) -> Snapshot:
    manifest = plan([("w", torch.zeros(8))], torch.float32, 1 << 10)
    buffers = [buffer.fill_(version) for buffer in manifest.allocate()]
    return Snapshot(policy_version=version, manifest=manifest, buffers=buffers, filling=filling)


def sent_to(group: Wire, snapshot: Snapshot) -> int:
    plan = SendPlan.everything(snapshot.manifest, 2)
    groups = SendGroups.form(lambda *_: group, plan)  # pyright: ignore[reportArgumentType]
    return send(groups, snapshot, Rooms("cpu", shared=False))[0]


def test_a_copy_that_stands_still_is_named_and_no_subscriber_is_blamed():
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(sending, "time", clock)
        group = Wire()
        assert sent_to(group, snapshot_of(0, SlowFilling(clock, TIMEOUT_S / 3))) == 32
        slow = snapshot_of(1, SlowFilling(clock, TIMEOUT_S / 2))
        with pytest.raises(RuntimeError, match=r"the copy out of the learner stood still for 4\.0 s"):
            sent_to(group, slow)
        assert not slow.filling.failed, "it can be sent again"


class LateWire(Wire):
    """Its second piece comes too late, whoever that is due to."""

    def wait(self, work: None) -> None:
        raise RuntimeError("one of its 1 subscribers is silent or too slow")


@pytest.mark.parametrize(
    ("rest_s", "blamed"), [(0.75 * TIMEOUT_S, "the copy out of the learner"), (0.5, "^one of its")]
)
def test_whoever_used_up_the_time_is_named_when_bytes_do_not_come_through(monkeypatch, rest_s, blamed):
    clock = Clock()
    monkeypatch.setattr(sending, "time", clock)
    with pytest.raises(RuntimeError, match=blamed):
        sent_to(LateWire(), snapshot_of(0, SlowFilling(clock, rest_s)))


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
    assert not sender._form(snapshot_of(0, SlowFilling(clock, 0.0)))
    waits = [round(late - early, 6) for early, late in itertools.pairwise(tried)]
    assert len(tried) == 20 and max(waits[:3]) < 0.05, "who died is soon done without"
    assert waits == sorted(waits) and waits[-1] == 1.0
    sender.close()
