"""The learner's loop with the real publisher: what engines get of each version, while it trains."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from asyncrl.weights.base import PublishStats
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.subscriber import BroadcastSubscriber
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.canary import Canary
from asyncrl.weights.files.sender import FilesSender
from asyncrl.weights.files.subscriber import FilesSubscriber
from asyncrl.weights.publishing.publisher import Sender, WeightPublisher
from tests.learner.fed_replay import FedReplay
from tests.learner.test_train import make_config, run
from tests.waiting import until
from tests.weights.board import Board, WorkerRendezvous

Tensors = dict[str, torch.Tensor]


class Recording(WeightPublisher):
    """Keeps what each version was when it was published."""

    def __init__(self, sender: Sender) -> None:
        super().__init__(sender, wire_dtype=torch.float32, bucket_bytes=1 << 12, wait_s=60.0)
        self.versions: dict[int, Tensors] = {}

    def publish(
        self, policy_version: int, tensors: Iterable[tuple[str, torch.Tensor]], canary: Canary | None = None
    ) -> PublishStats:
        self.wait()  # as it does itself, before anything is read
        named = list(tensors)
        self.versions[policy_version] = {name: tensor.detach().clone() for name, tensor in named}
        return super().publish(policy_version, named, canary)


@pytest.mark.parametrize("transport", ["sockets", "files"])
def test_every_version_that_an_engine_loads_is_the_one_that_was_published(tmp_path: Path, transport: str) -> None:
    board, loaded = Board(), dict[int, Tensors]()
    board.join("w", "1")

    def load(version: int, tensors: Tensors) -> None:
        loaded[version] = {name: tensor.clone() for name, tensor in tensors.items()}

    rendezvous = WorkerRendezvous(board, "w")
    if transport == "files":
        publisher = Recording(FilesSender(board, tmp_path / "weights", delta="always"))
        subscriber = FilesSubscriber(rendezvous, load)
    else:
        link = Link(host="127.0.0.1", timeout_s=60.0)
        publisher = Recording(BroadcastSender(board, link, poll_members_s=0.1))
        subscriber = BroadcastSubscriber(rendezvous, load, worker="w", incarnation="1", timeout_s=60.0)
    try:
        run(make_config(tmp_path), FedReplay(), publisher=publisher)
        until(lambda: 6 in loaded, "the last version", holds=lambda: subscriber.check() is None)
    finally:
        publisher.close()
        subscriber.close()
    assert list(publisher.versions) == list(range(7))
    assert len(loaded) > 2
    for version, tensors in loaded.items():
        assert tensors.keys() == publisher.versions[version].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, publisher.versions[version][name]), (version, name)
