from __future__ import annotations

import shutil

import pytest
import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.files import subscriber as subscribing
from asyncrl.weights.files.sender import FilesSender
from asyncrl.weights.files.subscriber import FilesSubscriber
from asyncrl.weights.publishing.publisher import WeightPublisher
from tests.waiting import until
from tests.weights.board import Board, WorkerRendezvous


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"b.w": torch.full((3, 2), float(version)), "a.w": torch.arange(4.0) + version}


class Cluster:
    def __init__(self, folder) -> None:
        self.folder = folder
        self.board = Board()
        self.loaded: list[tuple[int, dict[str, torch.Tensor]]] = []
        sender = FilesSender(self.board, folder)
        self.publisher = WeightPublisher(sender, wire_dtype=torch.bfloat16, bucket_bytes=1 << 20, wait_s=30)
        self.subscriber = None

    def subscribe(self):
        rendezvous = WorkerRendezvous(self.board, "a")
        self.subscriber = FilesSubscriber(
            rendezvous, lambda version, tensors: self.loaded.append((version, dict(tensors)))
        )
        return self.subscriber

    def publish(self, version: int) -> None:
        self.publisher.publish(version, weights(version).items())


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path / "weights")
    yield cluster
    cluster.publisher.close()
    if cluster.subscriber is not None:
        cluster.subscriber.close()


def test_a_version_makes_the_round_trip_in_the_wire_dtype(cluster):
    subscriber = cluster.subscribe()
    for version in range(3):
        cluster.publish(version)
        until(lambda version=version: subscriber.policy_version == version)
    for version, tensors in cluster.loaded:
        for name, tensor in weights(version).items():
            assert torch.equal(tensors[name], tensor.to(torch.bfloat16))
    until(lambda: [version for _, version, _, _ in cluster.board.served()] == [0, 1, 2])
    until(lambda: cluster.publisher.stats()["weights/sent_version"] == 2)


def test_only_the_newest_files_stay_and_a_late_joiner_finds_the_newest(cluster):
    for version in range(6):
        cluster.publish(version)
    until(lambda: cluster.board.view()[1]["weights"].get("policy_version") == 5)
    until(lambda: len(list(cluster.folder.glob("*.safetensors"))) == 3)
    subscriber = cluster.subscribe()
    until(lambda: subscriber.policy_version == 5)
    assert [version for version, _ in cluster.loaded] == [5]


@pytest.mark.parametrize("damage", ["torn", "flipped", "gone"])
def test_a_damaged_file_leaves_the_old_version_until_a_good_one_comes(cluster, damage, monkeypatch):
    monkeypatch.setattr(subscribing, "_AGAIN_S", 0.01)
    cluster.publish(0)
    subscriber = cluster.subscribe()
    until(lambda: subscriber.policy_version == 0)
    before = cluster.board.view()[1]["weights"]
    (item,) = before["items"]
    data = (cluster.folder / item["name"]).read_bytes()
    bad = cluster.folder / "v00000001-a-b.safetensors"
    if damage == "torn":
        bad.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        bad.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    announced = {"policy_version": 1, "fingerprint": "1", "items": [item | {"name": bad.name, "fingerprint": "1"}]}
    cluster.board.announce({"weights": before | announced})
    until(lambda: subscriber.stats()["weights/nacks"] >= 2)
    assert subscriber.policy_version == 0
    cluster.publish(2)
    until(lambda: subscriber.policy_version == 2)
    subscriber.check()
    assert [version for version, _ in cluster.loaded] == [0, 2]


def test_an_unwritable_directory_is_an_error_at_the_next_publish(cluster):
    shutil.rmtree(cluster.folder)
    cluster.folder.write_text("no folder")
    cluster.publish(0)
    until(lambda: cluster.publisher._failure is not None)
    with pytest.raises(WeightsError, match="could not be written"):
        cluster.publish(1)


def test_an_error_of_the_engine_stops_the_subscriber_and_is_raised_by_check(cluster):
    def refuse(version, tensors):
        raise WeightsError("no such parameter")

    cluster.publish(0)
    cluster.subscriber = FilesSubscriber(WorkerRendezvous(cluster.board, "a"), refuse)
    until(lambda: cluster.subscriber._failure is not None)
    with pytest.raises(WeightsError, match="no such parameter"):
        cluster.subscriber.check()
    assert cluster.board.served() == []


def test_the_parameter_set_is_fixed_by_the_first_publish(cluster):
    cluster.publish(0)
    with pytest.raises(WeightsError, match="other parameter names"):
        cluster.publisher.publish(1, [("c", torch.zeros(1))])
