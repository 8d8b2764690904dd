"""Processes of an engine that receive only their parts of the weights, over real groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from asyncrl.weights.boxes import Box, slices, whole
from asyncrl.weights.broadcast import staging
from asyncrl.weights.broadcast.group import WeightGroup
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.staging import Staging
from asyncrl.weights.broadcast.subscriber import BroadcastSubscriber
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.publishing.publisher import WeightPublisher
from tests.waiting import until
from tests.weights.board import Board, WorkerRendezvous

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TIMEOUT_S = 60.0
SIZES = {
    "embed": (202, 8), **{f"layers.{i}.{name}": shape for i in range(3) for name, shape in
    (("up", (48, 24)), ("down", (24, 48)), ("experts", (3, 16, 10)), ("norm", (24,)))}, "scale": (),
}  # fmt: skip


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SIZES.items()}


def kept(process: int, of: int = 2) -> dict[str, tuple[Box, ...]]:
    """Rows of `up` and `embed`, columns of `down`, of experts the same rows of both halves; nothing of a norm in the
    first process; the rest whole."""
    found: dict[str, tuple[Box, ...]] = {}
    for name, shape in SIZES.items():
        dim = {"down": 1, "up": 0, "embed": 0, "experts": 1}.get(name.rpartition(".")[2])
        if dim is None:
            continue
        halves = 2 if name.endswith("experts") else 1
        size = shape[dim] // halves
        boxes = []
        for half in range(halves):
            box = list(whole(shape))
            box[dim] = (half * size + process * size // of, half * size + (process + 1) * size // of)
            boxes.append(tuple(box))
        found[name] = tuple(boxes)
    return found | ({"layers.0.norm": ()} if process == 0 else {})


class Engine:
    """One process of it: takes its parts, as a loader does."""

    def __init__(self, board: Board, name: str, keeps: dict[str, tuple[Box, ...]] | None) -> None:
        self.name, self.keeps, self.staging = name, keeps or {}, Staging()
        self.staging.keeps = keeps
        self.version, self.parts = -1, {}
        board.join(name, "1")
        self.subscriber = BroadcastSubscriber(
            WorkerRendezvous(board, name), self.load, worker=name, incarnation="1", timeout_s=TIMEOUT_S,
            receiver=self.staging,
        )  # fmt: skip

    def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        assert list(tensors) == list(SIZES)
        parts = {}
        for name, tensor in tensors.items():
            assert tensor.shape == SIZES[name]
            for box in self.keeps.get(name, (whole(SIZES[name]),)):
                part = torch.empty([b - a for a, b in box])
                parts[name, box] = part.copy_(tensor[slices(box)] if box else tensor)
        self.version, self.parts = version, parts

    def wait(self, version: int) -> None:
        until(
            lambda: self.version == version,
            f"{self.name} has it not",
            within_s=2 * TIMEOUT_S,
            holds=lambda: self.subscriber.check() is None,
        )
        expected = weights(version)
        for (name, box), part in self.parts.items():
            assert torch.equal(part, expected[name][slices(box)] if box else expected[name]), (self.name, name, box)


@contextmanager
def engines(board: Board, *keeps: dict[str, tuple[Box, ...]] | None) -> Iterator[list[Engine]]:
    found = [Engine(board, f"w{i}", each) for i, each in enumerate(keeps)]
    try:
        yield found
    finally:
        for each in found:
            each.subscriber.close()


@contextmanager
def publishing(board: Board, backend: str = "sockets") -> Iterator[WeightPublisher]:
    link = Link(host="127.0.0.1", timeout_s=TIMEOUT_S, backend=backend)
    publisher = WeightPublisher(
        BroadcastSender(board, link, poll_members_s=0.1), wire_dtype=torch.float32, bucket_bytes=1 << 12,
        wait_s=2 * TIMEOUT_S,
    )  # fmt: skip
    try:
        yield publisher
    finally:
        publisher.close()


def settled(publisher: Any, version: int) -> dict[str, float]:
    until(lambda: publisher.stats()["weights/sent_version"] == version, within_s=2 * TIMEOUT_S)
    return publisher.stats()


@pytest.mark.parametrize(
    "how",
    [{}, {"backend": "ipc"}],
    ids=lambda how: ", ".join(f"{key}={value}" for key, value in how.items()) or "rank0",
)
def test_two_processes_get_and_stage_their_halves_beside_one_that_gets_all(how):
    """Of the same version, from one sender, which sends no more than the model."""
    board = Board()
    sizes = {name: tensor.nbytes for name, tensor in weights(0).items()}
    with engines(board, kept(0), kept(1), None) as members, publishing(board, **how) as publisher:
        for version in range(3):
            publisher.publish(version, list(weights(version).items()))
            for engine in members:
                engine.wait(version)
            publisher.wait()
        stats = settled(publisher, 2)
        halves = [engine.staging.nbytes for engine in members]
    cut = sum(n for name, n in sizes.items() if not name.endswith(("norm", "scale")))
    rest = sum(sizes.values()) - cut
    padding = 16 * 4 * len(sizes)
    assert cut / 2 <= halves[0] <= halves[1] <= cut / 2 + rest + padding
    assert halves[2] >= cut + rest
    assert stats["weights/wire_bytes"] <= sum(sizes.values()) + padding * 3
    assert all(engine.subscriber.stats()["weights/nacks"] == 0 for engine in members)


def test_a_process_that_comes_later_changes_what_goes_to_whom():
    board = Board()
    with publishing(board) as publisher, engines(board, kept(0), kept(1)) as members:
        publisher.publish(0, weights(0).items())
        for engine in members:
            engine.wait(0)
        late = Engine(board, "late", None)
        late.wait(0)
        publisher.publish(1, weights(1).items())
        for engine in [*members, late]:
            engine.wait(1)
        assert late.staging.nbytes > 1.5 * members[0].staging.nbytes
        late.subscriber.close()


class LeavingGroup(WeightGroup):
    """One process loses its groups amid its third piece, once."""

    left, count = 1, 0

    def broadcast(self, buffer: torch.Tensor) -> Any:
        LeavingGroup.count += 1
        if LeavingGroup.count == 3:
            LeavingGroup.left -= 1
            self.abort()
            raise RuntimeError("one of its processes is gone")
        return super().broadcast(buffer)


def test_a_transfer_that_breaks_in_one_lane_is_begun_anew_for_all(monkeypatch):
    board = Board()
    monkeypatch.setattr(staging, "WeightGroup", LeavingGroup)
    with engines(board, kept(0), kept(1), None) as members, publishing(board) as publisher:
        for version in range(2):
            publisher.publish(version, weights(version).items())
            for engine in members:
                engine.wait(version)
        assert settled(publisher, 1)["weights/epoch"] > 1 and not LeavingGroup.left


class DamagingGroup(WeightGroup):
    """One piece of the second process' own lane arrives damaged, once."""

    left = 1

    def broadcast(self, buffer: torch.Tensor) -> Any:
        return buffer, super().broadcast(buffer)

    def wait(self, work: Any) -> None:
        buffer, underway = work
        super().wait(underway)
        if DamagingGroup.left and self.world == 2:
            DamagingGroup.left -= 1
            buffer[3] ^= 1


def test_a_damaged_part_is_noticed_by_its_own_fingerprint(monkeypatch):
    board = Board()
    monkeypatch.setattr(staging, "WeightGroup", DamagingGroup)
    with engines(board, kept(0), kept(1)) as members, publishing(board) as publisher:
        publisher.publish(0, weights(0).items())
        for engine in members:
            engine.wait(0)
        assert sum(engine.subscriber.stats()["weights/nacks"] for engine in members) == 1
        assert settled(publisher, 0)["weights/resends"] >= 1
