from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from asyncrl.weights.broadcast import group
from asyncrl.weights.broadcast.group import WeightGroup
from asyncrl.weights.broadcast.wires import Link


class Clock:
    """In place of the `time` of the group: moves when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class SlowNetwork:
    """In place of gloo: every broadcast takes as long."""

    piece_bytes = 10

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self.timeouts: list[float] = []

    def broadcast(self, buffer: torch.Tensor, left_s: float) -> None:
        self.timeouts.append(left_s)

    def wait(self, work: None, left_s: float) -> None:
        self._clock.now += self._seconds

    def abort(self) -> None: ...


def make(monkeypatch: pytest.MonkeyPatch, seconds: float, rank: int = 0) -> tuple[WeightGroup, SlowNetwork]:
    clock = Clock()
    monkeypatch.setattr(group, "time", clock)
    monkeypatch.setattr(group, "STRETCH", 30)
    store = dist.HashStore()
    made = WeightGroup(store, Link(host="127.0.0.1", timeout_s=10.0), epoch=3, rank=0, world=1)
    made.rank, made.world = rank, 3
    made._wire = network = SlowNetwork(clock, seconds)
    return made, network


def send(weights: WeightGroup, nbytes: int) -> int:
    done = 0
    for piece in weights.pieces(torch.zeros(nbytes, dtype=torch.uint8)):
        weights.wait(weights.broadcast(piece))
        done += 1
    return done


def test_the_pieces_of_a_bucket_share_one_deadline_and_every_bucket_has_its_own(monkeypatch: pytest.MonkeyPatch):
    weights, network = make(monkeypatch, 3.0)
    assert [send(weights, 30), send(weights, 0), send(weights, 15)] == [3, 0, 2]
    assert network.timeouts == [10.0, 7.0, 4.0, 10.0, 7.0]


def test_a_bucket_that_one_large_tensor_fills_has_a_deadline_for_every_stretch(monkeypatch: pytest.MonkeyPatch):
    weights, network = make(monkeypatch, 3.0)
    assert send(weights, 75) == 8
    assert network.timeouts == [10.0, 7.0, 4.0, 10.0, 7.0, 4.0, 10.0, 7.0]


@pytest.mark.parametrize(
    ("rank", "whom"), [(0, "one of its 2 subscribers"), (1, "the publisher or another subscriber")]
)
def test_a_bucket_that_drips_through_ends_at_its_deadline_with_whom_it_waited_for(
    monkeypatch: pytest.MonkeyPatch, rank: int, whom: str
):
    weights, network = make(monkeypatch, 6.0, rank)
    with pytest.raises(RuntimeError, match=rf"epoch 3: a bucket was not transferred within 10\.0 s, {whom} is silent"):
        send(weights, 100)
    assert len(network.timeouts) == 2
