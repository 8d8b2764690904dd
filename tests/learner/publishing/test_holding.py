"""The optimizer's step behind the copy of the weights: the same bits in parts, and never on what is still read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn

from asyncrl.errors import WeightsError
from asyncrl.learner.optimizer.one_by_one import HostMoments
from asyncrl.learner.publishing.holding import hold_back
from asyncrl.weights.publishing import snapshot
from asyncrl.weights.publishing.snapshot import BackgroundPublisher
from tests.learner.fed_replay import KeptWeights
from tests.weights.test_snapshot import HeldSender, until

SHAPES = ((7, 5), (11,), (3, 4, 2), (1,), (64, 33))


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_gradients(of: Sequence[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for number, parameter in enumerate(of):
        parameter.grad = None if number == 1 else torch.randn(parameter.shape, generator=generator)


def make(kind: str, of: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": list(of[:2]), "weight_decay": 0.1}, {"params": list(of[2:])}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    return (HostMoments if kind == "host" else torch.optim.AdamW)(groups, lr=1e-2, fused=True)


class InParts(KeptWeights):
    """Gives free a few parameters at a time, and at the last those that it has not named."""

    def __init__(self, parts: Sequence[Sequence[nn.Parameter]]) -> None:
        super().__init__()
        self._parts = parts
        self.as_they_were: list[list[torch.Tensor]] = []

    def copied(self) -> Iterator[Sequence[torch.Tensor]]:
        for part in self._parts:
            self.as_they_were.append([parameter.detach().clone() for parameter in part])
            yield [parameter.detach() for parameter in part]


@pytest.mark.parametrize("kind", ["adamw", "host", "sgd"])
def test_a_step_in_parts_is_the_same_bits_and_no_part_is_stepped_before_it_is_free(kind: str):
    whole, ours = parameters(), parameters()
    at_once, in_parts = make(kind, whole), make(kind, ours)
    publisher = InParts([ours[4:], [], [ours[1], ours[0]], [ours[3]]])  # the third is not named
    hold_back(in_parts, publisher)
    for seed in range(3):
        before = [parameter.detach().clone() for parameter in ours]
        publisher.as_they_were.clear()
        for each, optimizer in ((whole, at_once), (ours, in_parts)):
            give_gradients(each, seed)
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(whole, ours, strict=True)), seed
        found = [tensor for part in publisher.as_they_were for tensor in part]
        assert all(torch.equal(a, before[i]) for a, i in zip(found, (4, 1, 0, 3), strict=True)), "once each, in order"


class Held:
    """In the place of `gather_into`: copies tensor after tensor, each when it is told to; or breaks after the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, breaks: bool = False) -> None:
        self.go, self._breaks = threading.Semaphore(0), breaks
        monkeypatch.setattr(snapshot, "gather_into", self)
        monkeypatch.setattr(snapshot, "_LEAST_PART", 1)

    def __call__(self, manifest, named, buffers, group, filling, hashed) -> list[str]:
        views, done = manifest.views(buffers), 0
        for (name, tensor), entry in zip(named, manifest.buckets[0].entries, strict=True):
            assert self.go.acquire(timeout=60)
            if self._breaks and done:
                raise RuntimeError("rank 1 is gone")
            views[name].copy_(tensor)
            done = entry.offset + entry.nbytes
            filling.reach(done)
        return ["" for _ in manifest.buckets]


def stepping(publisher: BackgroundPublisher, of: Sequence[nn.Parameter]) -> tuple[threading.Thread, list[Exception]]:
    optimizer, errors = torch.optim.SGD(of, lr=1.0), list[Exception]()
    hold_back(optimizer, publisher)
    for parameter in of:
        parameter.grad = torch.ones_like(parameter)

    def step() -> None:
        try:
            optimizer.step()
        except WeightsError as error:
            errors.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    return thread, errors


def values(of: Sequence[torch.Tensor]) -> list[float]:
    return [float(tensor.detach().flatten()[0]) for tensor in of]


def test_the_optimizer_follows_the_copy_and_what_is_sent_is_the_version(monkeypatch):
    sender, held = HeldSender(), Held(monkeypatch)
    ours = [nn.Parameter(torch.zeros(64)) for _ in range(3)]
    publisher = BackgroundPublisher(sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=60.0)
    publisher.publish(0, [(f"w{i}", p.detach()) for i, p in enumerate(ours)])
    thread, errors = stepping(publisher, ours)
    thread.join(0.1)
    assert values(ours) == [0.0, 0.0, 0.0], "nothing is copied"
    for number in range(3):
        held.go.release()
        until(lambda number=number: values(ours) == [-1.0] * (number + 1) + [0.0] * (2 - number))
    thread.join(60)
    assert not thread.is_alive() and not errors
    until(lambda: sender.started == [0])
    (sent,) = sender.snapshots
    assert values(list(sent.manifest.views(sent.buffers).values())) == [0.0, 0.0, 0.0]
    sender.go.release()
    publisher.close()


def test_views_of_one_memory_are_free_with_the_last_of_them(monkeypatch):
    sender, held = HeldSender(), Held(monkeypatch)
    both = nn.Parameter(torch.zeros(128))
    publisher = BackgroundPublisher(sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=60.0)
    publisher.publish(0, [("first", both.detach()[:64]), ("second", both.detach()[64:])])
    thread, _ = stepping(publisher, [both])
    held.go.release()
    thread.join(0.1)
    assert thread.is_alive() and float(both.detach().abs().max()) == 0.0
    held.go.release()
    thread.join(60)
    assert not thread.is_alive() and float(both.detach().max()) == -1.0
    sender.go.release()
    publisher.close()


def test_a_copy_that_breaks_off_behind_which_the_optimizer_has_begun_is_the_error_of_its_step(monkeypatch):
    sender, held = HeldSender(), Held(monkeypatch, breaks=True)
    ours = [nn.Parameter(torch.zeros(64)) for _ in range(3)]
    publisher = BackgroundPublisher(sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=60.0)
    publisher.publish(0, [(f"w{i}", p.detach()) for i, p in enumerate(ours)])
    thread, errors = stepping(publisher, ours)
    held.go.release(2)
    thread.join(60)
    assert not thread.is_alive()
    (error,) = errors
    assert "version 0 could not be copied out of the learner: rank 1 is gone" in str(error)
    publisher.close()
    assert sender.started == []
