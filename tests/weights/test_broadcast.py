from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from asyncrl.engines.parameters import ParameterTable
from asyncrl.errors import ModelMismatchError, WeightsError
from asyncrl.weights.broadcast import door, staging
from asyncrl.weights.broadcast import publisher as broadcast_publisher
from asyncrl.weights.broadcast.group import WeightGroup
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.subscriber import BroadcastSubscriber
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.canary import Canary, Proof, random_probes
from asyncrl.weights.fingerprint import bucket_fingerprint
from asyncrl.weights.publishing.gather import Gather
from asyncrl.weights.publishing.publisher import WeightPublisher
from tests.forked import forked_from
from tests.waiting import until
from tests.weights.board import BoardManager, WorkerRendezvous

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TIMEOUT_S = 20.0
SHORT_S = 4.0
"""Where somebody is silent, and that is what is waited for."""
BUCKET = 1 << 12
PROBES = random_probes(1000, seed=0)


def weights(version: int) -> dict[str, torch.Tensor]:
    """Several buckets; every value depends on the version."""
    return {f"layers.{i}.w": torch.full((40, 25), float(version * 100 + i)) for i in range(6)}


def fingerprint_of(tensors: dict[str, torch.Tensor]) -> str:
    return "".join(bucket_fingerprint(t.contiguous().view(-1).view(torch.uint8)) for _, t in sorted(tensors.items()))


class CorruptingGroup(WeightGroup):
    """Damages one bucket of the first version that passes through this receiver, after it arrived."""

    done = False

    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, **settings)
        self.coming: list[torch.Tensor] = []

    def broadcast(self, buffer):
        self.coming.append(buffer)
        return super().broadcast(buffer)

    def wait(self, work) -> None:
        super().wait(work)
        arrived = self.coming.pop(0)
        if not CorruptingGroup.done and self.rank > 0:
            CorruptingGroup.done = True
            arrived[3] ^= 1


class DyingGroup(WeightGroup):
    """Its process dies in the middle of a version."""

    count = 0

    def broadcast(self, buffer):
        DyingGroup.count += 1
        if DyingGroup.count == 4:
            os._exit(1)
        return super().broadcast(buffer)


class AwayStaging(staging.Staging):
    """Of an engine that has no process until the board says so."""

    def __init__(self, board) -> None:
        super().__init__()
        self._board = board

    @property
    def width(self) -> int:
        self._board.note("width asked", True)
        return int(bool(self._board.notes("back")))


def make_publisher(board, timeout_s: float = TIMEOUT_S) -> WeightPublisher:
    sender = BroadcastSender(board, Link(host="127.0.0.1", timeout_s=timeout_s), poll_members_s=0.2)
    return WeightPublisher(sender, wire_dtype=torch.float32, bucket_bytes=BUCKET, wait_s=120.0)


def subscriber_process(board, worker: str, group: str, timeout_s: float, lifetime_s: float) -> None:
    torch.set_num_threads(1)
    staging.WeightGroup = {"corrupt": CorruptingGroup, "dying": DyingGroup}.get(group, WeightGroup)

    def load(version: int, tensors: dict[str, torch.Tensor]) -> None:
        board.note(f"{worker}/bytes/{version}", fingerprint_of(dict(tensors)))

    board.join(worker, "1")
    subscriber = BroadcastSubscriber(
        WorkerRendezvous(board, worker), load, worker=worker, incarnation="1", timeout_s=timeout_s,
        receiver=AwayStaging(board) if group == "away" else None,
    )  # fmt: skip
    deadline = time.monotonic() + lifetime_s
    while time.monotonic() < deadline and not board.notes("stop"):
        subscriber.check()
        time.sleep(0.05)
    board.note(f"{worker}/stats", subscriber.stats() | {"policy_version": subscriber.policy_version})
    subscriber.close()


def publisher_process(board, version: int) -> None:
    torch.set_num_threads(1)
    publisher = make_publisher(board)
    publisher.publish(version, weights(version).items())
    time.sleep(200)


class Cluster:
    """Processes of one test; everything still alive at the end is killed."""

    def __init__(self, board) -> None:
        self.board = board
        self._context = forked_from("tests.weights.chaos_processes")
        self.processes: list = []

    def worker(self, name: str, group: str = "plain", timeout_s: float = TIMEOUT_S):
        return self._start(subscriber_process, (self.board, name, group, timeout_s, 250.0))

    def publisher(self, version: int):
        return self._start(publisher_process, (self.board, version))

    def _start(self, target, args):
        process = self._context.Process(target=target, args=args, daemon=True)
        process.start()
        self.processes.append(process)
        return process

    def wait_served(self, worker: str, version: int, wait_s: float = 100.0) -> float:
        """Time at which `worker` served `version`."""
        return until(
            lambda: next((when for who, what, _, when in self.board.served() if (who, what) == (worker, version)), 0.0),
            lambda: f"{worker} never served {version}; served: {self.board.served()}",
            within_s=wait_s,
        )

    def finish(self, worker: str) -> dict[str, float]:
        """Stop all workers; the statistics of one."""
        self.board.note("stop", True)
        return self.wait_note(f"{worker}/stats")

    def wait_note(self, key: str):
        """The only one of that name."""
        found = until(lambda: self.board.notes(key), lambda: f"nobody noted {key}", within_s=100)
        (note,) = found
        return note

    def bytes_of(self, worker: str, version: int) -> list[str]:
        return self.board.notes(f"{worker}/bytes/{version}")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with BoardManager() as manager:
        cluster = Cluster(manager.Board())  # pyright: ignore
        yield cluster
        for process in cluster.processes:
            process.kill()
            process.join(10)


def wait_stats(publisher: WeightPublisher, **least: float) -> dict[str, float]:
    """The publisher's statistics once each named one is at least so much: a worker serves before it is counted."""
    deadline = time.monotonic() + 100
    while True:
        stats = {name.removeprefix("weights/"): value for name, value in publisher.stats().items()}
        if all(stats[name] >= value for name, value in least.items()):
            return stats
        assert time.monotonic() < deadline, (least, stats)
        time.sleep(0.005)


def members(board) -> list[list[str]]:
    """Of the epoch that is announced."""
    return sorted(board.view()[1]["weights"]["members"])


@contextlib.contextmanager
def publishing(board, timeout_s: float = TIMEOUT_S) -> Iterator[WeightPublisher]:
    publisher = make_publisher(board, timeout_s)
    try:
        yield publisher
    finally:
        publisher.close()


def test_publishing_before_anyone_is_there_succeeds_and_two_subscribers_get_the_same_bytes(cluster):
    with publishing(cluster.board) as publisher:
        for version in range(3):
            publisher.publish(version, weights(version).items())
        for name in ("a", "b"):
            cluster.worker(name)
        for version in (2, 3, 4):
            if version > 2:
                publisher.publish(version, weights(version).items())
            for name in ("a", "b"):
                cluster.wait_served(name, version)
                assert cluster.bytes_of(name, version) == [fingerprint_of(weights(version))]
        assert wait_stats(publisher, sent_version=4, engines=2)["engines"] == 2
        assert members(cluster.board) == [["a", "1"], ["b", "1"]]
    prints = {(v, f) for _, v, f, _ in cluster.board.served()}
    assert len({v for v, _ in prints}) == len(prints)


class CountingRendezvous:
    def __init__(self, board) -> None:
        self._board, self.asked = board, 0

    def announce(self, values) -> None:
        self._board.announce(values)

    def members(self):
        self.asked += 1
        return self._board.members()


def test_the_server_is_not_asked_for_the_members_before_every_version_and_a_newcomer_is_served_all_the_same(cluster):
    rendezvous, versions = CountingRendezvous(cluster.board), 10
    sender = BroadcastSender(rendezvous, Link(host="127.0.0.1", timeout_s=TIMEOUT_S), poll_members_s=100.0)
    publisher = WeightPublisher(sender, wire_dtype=torch.float32, bucket_bytes=BUCKET, wait_s=120.0)
    cluster.worker("a")
    publisher.publish(0, weights(0).items())
    cluster.wait_served("a", 0)
    wait_stats(publisher, sent_version=0)
    before = rendezvous.asked
    for version in range(1, versions + 1):
        publisher.publish(version, weights(version).items())
        wait_stats(publisher, sent_version=version)
    assert rendezvous.asked - before < 2 * versions, "once while it waits for the answers, and not before it sends"
    cluster.worker("b")
    cluster.wait_served("b", versions)
    publisher.close()


def test_a_damaged_bucket_is_never_loaded_and_the_version_is_sent_again(cluster):
    cluster.worker("a", group="corrupt")
    with publishing(cluster.board) as publisher:
        publisher.publish(7, weights(7).items())
        cluster.wait_served("a", 7)
        assert cluster.bytes_of("a", 7) == [fingerprint_of(weights(7))]
        assert wait_stats(publisher, sent_version=7, resends=1)["engines"] == 1
        assert cluster.finish("a")["weights/nacks"] == 1


def test_a_worker_that_never_comes_is_named_once_with_the_address_it_should_come_to(cluster, monkeypatch, caplog):
    monkeypatch.setattr(door, "TOLD_S", 0.2)
    cluster.board.join("far away", "its life")
    with publishing(cluster.board) as publisher:
        publisher.publish(0, weights(0).items())
        cluster.worker("a")
        wait_stats(publisher, sent_version=0, engines=1)
        time.sleep(1.0)
        port = cluster.board.view()[1]["weights"]["port"]
    said = [each.getMessage() for each in caplog.records if each.name == door.__name__]
    told = [line for line in said if "far away" in line]
    assert len(told) == 1 and told[0].startswith("weights: workers that the replay server knows have not come here")
    assert f" to 127.0.0.1:{port}, for " in told[0]
    assert ": far away. weights.host must be an address of the learner that a worker's machine can reach" in told[0]


def test_a_receiver_killed_mid_way_does_not_keep_the_others_from_the_version(cluster):
    cluster.worker("a")
    dying = cluster.worker("b", group="dying")
    with publishing(cluster.board) as publisher:
        publisher.publish(1, weights(1).items())
        cluster.wait_served("a", 1)
        dying.join(100)
        assert dying.exitcode == 1
        publisher.publish(2, weights(2).items())
        cluster.wait_served("a", 2)
        assert cluster.bytes_of("a", 2) == [fingerprint_of(weights(2))]
        assert not cluster.bytes_of("b", 2)


def test_a_late_joiner_is_brought_to_the_current_version_without_a_publication(cluster):
    cluster.worker("a")
    with publishing(cluster.board) as publisher:
        publisher.publish(4, weights(4).items())
        cluster.wait_served("a", 4)
        cluster.worker("late")
        cluster.wait_served("late", 4)
        assert cluster.bytes_of("late", 4) == [fingerprint_of(weights(4))]
        assert len(cluster.bytes_of("a", 4)) == 1, "who serves it already does not load it again"


def test_a_subscriber_outlives_its_publisher_and_follows_the_next_one(cluster):
    first = cluster.publisher(1)
    cluster.worker("a")
    cluster.wait_served("a", 1)
    first.kill()
    first.join(10)
    with publishing(cluster.board) as publisher:
        publisher.publish(2, weights(2).items())
        cluster.wait_served("a", 2)
        stats = cluster.finish("a")
    assert stats["policy_version"] == 2
    assert [version for _, version, _, _ in cluster.board.served()] == [1, 2]


def test_a_stalled_member_is_left_out_and_returns_by_itself(cluster):
    cluster.worker("a", timeout_s=SHORT_S)
    stalled = cluster.worker("b", timeout_s=SHORT_S)
    with publishing(cluster.board, timeout_s=SHORT_S) as publisher:
        publisher.publish(1, weights(1).items())
        cluster.wait_served("a", 1)
        cluster.wait_served("b", 1)
        os.kill(stalled.pid, signal.SIGSTOP)
        publisher.publish(2, weights(2).items())
        cluster.wait_served("a", 2)  # while the other one is still frozen
        os.kill(stalled.pid, signal.SIGCONT)
        cluster.wait_served("b", 2)


def test_an_engine_without_any_process_is_not_waited_for_and_joins_when_it_has_one(cluster, monkeypatch, caplog):
    monkeypatch.setattr(door, "TOLD_S", 1.0)
    cluster.worker("a")
    cluster.worker("b", group="away")
    with publishing(cluster.board) as publisher:
        until(
            lambda: len(cluster.board.notes("width asked")) >= 2,
            "nobody asked b for its processes",
            within_s=100,
        )
        publisher.publish(1, weights(1).items())
        cluster.wait_served("a", 1)
        assert wait_stats(publisher, sent_version=1, engines=1)["resends"] == 0
        assert members(cluster.board) == [["a", "1"]]
        time.sleep(2.0)
        assert "have not come here" not in caplog.text  # it did, and waits for a process
        cluster.board.note("back", True)
        cluster.wait_served("b", 1)
        assert cluster.bytes_of("b", 1) == [fingerprint_of(weights(1))]


def test_a_gather_that_breaks_off_while_it_is_sent_is_loaded_by_nobody(cluster, monkeypatch):
    on_the_wire, real, begin = threading.Event(), WeightGroup.broadcast, Gather.begin

    def telling(group: WeightGroup, piece: torch.Tensor):
        on_the_wire.set()
        return real(group, piece)

    def breaking(gather, bucket, tensors):
        if bucket is not first:
            begun.append(bucket)
            if len(begun) > 2:
                assert on_the_wire.wait(60), "nothing of version 2 was sent"
                raise RuntimeError("rank 1 is gone")
        return begin(gather, bucket, tensors)

    cluster.worker("a")
    with publishing(cluster.board) as publisher:
        publisher.publish(1, weights(1).items())
        cluster.wait_served("a", 1)
        wait_stats(publisher, sent_version=1)
        assert publisher._manifest is not None
        first, begun = publisher._manifest.buckets[0], []
        monkeypatch.setattr(WeightGroup, "broadcast", telling)
        monkeypatch.setattr(Gather, "begin", breaking)
        publisher.publish(2, weights(2).items())
        with pytest.raises(WeightsError, match=r"version 2 could not be gathered .*: rank 1 is gone"):
            publisher.wait()
    assert cluster.finish("a")["policy_version"] == 1
    assert not cluster.bytes_of("a", 2)


def proving_process(board, worker: str, stuck: bool) -> None:
    """Its engine is a table; a stuck one keeps the row of layer 3 that it got first."""
    torch.set_num_threads(1)
    tensors: dict[str, torch.Tensor] = {}

    def load(version: int, staged: dict[str, torch.Tensor]) -> None:
        for name, tensor in staged.items():
            if not (stuck and name == "layers.3.w" and name in tensors):
                tensors[name] = tensor.clone()

    board.join(worker, "1")
    subscriber = BroadcastSubscriber(
        WorkerRendezvous(board, worker), load, worker=worker, incarnation="1", timeout_s=TIMEOUT_S,
        proof=Proof(score=lambda _: score(tensors), engine_dtype="float32", verify_every=2),
    )  # fmt: skip
    deadline = time.monotonic() + 250
    while time.monotonic() < deadline and not board.notes("stop"):
        try:
            subscriber.check()
        except WeightsError as error:
            board.note(f"{worker}/error", str(error))
            return
        time.sleep(0.02)


def score(tensors: dict[str, torch.Tensor]) -> list[np.ndarray]:
    return [
        np.array([float(tensors[f"layers.{i % 6}.w"][i % 40, 0]) for i in ids[1:].tolist()], np.float32)
        for ids in PROBES
    ]


def test_an_engine_that_keeps_one_old_tensor_is_found_by_the_canary_and_the_others_serve_on(cluster):
    cluster._start(proving_process, (cluster.board, "good", False))
    cluster._start(proving_process, (cluster.board, "stuck", True))
    with publishing(cluster.board) as publisher:
        for version in range(4):
            canary = Canary(
                sequences=PROBES, logprobs=tuple(score(weights(version))), learner_dtype="float32", wire_dtype="float32"
            )
            publisher.publish(version, weights(version).items(), canary)
            cluster.wait_served("good", version)
            if version == 0:  # In one group before the next: the first version of a new one would be proven too.
                cluster.wait_served("stuck", version)
                wait_stats(publisher, sent_version=0, engines=2)
        error = cluster.wait_note("stuck/error")
        stats = wait_stats(publisher, sent_version=3)
        assert (stats["refused"], stats["canary_failed"], stats["canary_max"]) == (1, 1, 0.0)
    assert "version 2 is not served" in error and "Probe 0" in error
    assert {version for worker, version, _, _ in cluster.board.served() if worker == "stuck"} == {0, 1}


def refusing_process(board) -> None:
    torch.set_num_threads(1)
    layer = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(40, 24))})
    table = ParameterTable(torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])}))
    board.join("other", "1")
    subscriber = BroadcastSubscriber(
        WorkerRendezvous(board, "other"), lambda version, tensors: None, worker="other", incarnation="1",
        timeout_s=TIMEOUT_S, admit=table.check,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        try:
            subscriber.check()
        except ModelMismatchError as error:
            board.note("other/error", str(error))
            return
        time.sleep(0.02)


def test_a_worker_with_another_model_refuses_the_invitation_with_the_first_name_and_takes_no_memory(cluster):
    cluster._start(refusing_process, (cluster.board,))
    with publishing(cluster.board) as publisher:
        publisher.publish(1, weights(1).items())
        error = cluster.wait_note("other/error")
    assert error == "parameter 'layers.0.w' has shape (40, 25), the engine's model needs (40, 24)"
    assert not cluster.board.served()


def test_broadcast_publisher_has_no_default_group_of_its_own():
    assert broadcast_publisher.WeightGroup is WeightGroup
    assert not torch.distributed.is_initialized()
