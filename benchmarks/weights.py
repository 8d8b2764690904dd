"""What does a publication cost, by phase, beside a bare broadcast of the same bytes?

    python benchmarks/weights.py [--parameters 150000 10000000 100000000] [--receivers 1] [--rounds 5]

One learner process, receivers in processes of their own, gloo on loopback. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.managers import BaseManager
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from asyncrl.weights.broadcast_publisher import BroadcastSender
from asyncrl.weights.broadcast_subscriber import BroadcastSubscriber
from asyncrl.weights.group import WeightGroup, connect_store, host_store
from asyncrl.weights.snapshot import BackgroundPublisher

TIMEOUT_S = 60.0
BUCKET = 64 << 20


class Member(NamedTuple):
    worker: str
    incarnation: str
    policy_version: int


class View(NamedTuple):
    revision: int
    values: dict[str, Any]


class Board:
    def __init__(self) -> None:
        self.revision, self.values, self.peers, self.times = 0, {}, [], []

    def announce(self, values: dict[str, Any]) -> None:
        self.revision, self.values = self.revision + 1, self.values | values

    def view(self) -> tuple[int, dict[str, Any]]:
        return self.revision, self.values

    def join(self, worker: str) -> None:
        self.peers.append(worker)

    def members(self) -> list[Member]:
        return [Member(worker, "1", -1) for worker in self.peers]

    def record(self, version: int, when: float, load_s: float) -> None:
        self.times.append((version, when, load_s))

    def recorded(self) -> list[tuple[int, float, float]]:
        return self.times


class BoardManager(BaseManager):
    pass


BoardManager.register("Board", Board)


class Rendezvous:
    def __init__(self, board: Any, loads: list[float]) -> None:
        self.board, self.loads = board, loads

    def watch(self, revision: int, wait_s: float) -> View:
        deadline = time.monotonic() + wait_s
        while True:
            view = View(*self.board.view())
            if view.revision != revision or time.monotonic() >= deadline:
                return view
            time.sleep(0.01)

    def served(self, policy_version: int, fingerprint: str) -> None:
        self.board.record(policy_version, time.time(), self.loads[-1])


def receiver(board: Any, worker: str) -> None:
    torch.set_num_threads(1)
    loads: list[float] = []
    model: dict[str, torch.Tensor] = {}

    def load(_: int, tensors: dict[str, torch.Tensor]) -> None:
        started = time.perf_counter()
        for name, tensor in tensors.items():
            model.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        loads.append(time.perf_counter() - started)

    board.join(worker)
    subscriber = BroadcastSubscriber(
        Rendezvous(board, loads), load, worker=worker, incarnation="1", timeout_s=TIMEOUT_S
    )
    time.sleep(3600)
    subscriber.close()


def bare_receiver(port: int, rank: int, world: int, nbytes: int, rounds: int) -> None:
    torch.set_num_threads(1)
    store = connect_store("127.0.0.1", port, TIMEOUT_S)
    group = WeightGroup(store, backend="gloo", host="127.0.0.1", epoch=0, rank=rank, world=world, timeout_s=TIMEOUT_S)
    buffers = [torch.zeros(min(BUCKET, nbytes - start), dtype=torch.uint8) for start in range(0, nbytes, BUCKET)]
    for _ in range(rounds):
        for buffer in buffers:
            group.wait(group.broadcast(buffer))


def bare_broadcast(nbytes: int, receivers: int, rounds: int) -> float:
    """Median seconds of broadcasting `nbytes` in the same buckets, with nothing else."""
    store, port = host_store("127.0.0.1", TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=bare_receiver, args=(port, rank, receivers + 1, nbytes, rounds + 1), daemon=True)
        for rank in range(1, receivers + 1)
    ]
    for process in others:
        process.start()
    group = WeightGroup(
        store, backend="gloo", host="127.0.0.1", epoch=0, rank=0, world=receivers + 1, timeout_s=TIMEOUT_S
    )
    buffers = [torch.zeros(min(BUCKET, nbytes - start), dtype=torch.uint8) for start in range(0, nbytes, BUCKET)]
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        for buffer in buffers:
            group.wait(group.broadcast(buffer))
        seconds.append(time.perf_counter() - started)
    for process in others:
        process.join(30)
    return statistics.median(seconds[1:])


def model_of(parameters: int) -> dict[str, torch.Tensor]:
    """Like a transformer: 12 tensors per layer, 2 to 24 layers."""
    layers = 2 if parameters < 1_000_000 else 24
    each = parameters // (layers * 12)
    return {f"model.layers.{i}.w{j}": torch.randn(each) for i in range(layers) for j in range(12)}


def wait_all(board: Any, version: int, receivers: int) -> tuple[float, float]:
    """(time the last receiver served it, its load seconds)."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        found = [(when, load_s) for what, when, load_s in board.recorded() if what == version]
        if len(found) == receivers:
            return max(found)
        time.sleep(0.002)
    raise TimeoutError(f"version {version} was not served by {receivers} receivers in {TIMEOUT_S} s")


def measure(parameters: int, receivers: int, rounds: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    model = model_of(parameters)
    rows = []
    with BoardManager() as manager:
        board = manager.Board()  # pyright: ignore
        sender = BroadcastSender(board, host="127.0.0.1", timeout_s=TIMEOUT_S)
        publisher = BackgroundPublisher(sender, wire_dtype=torch.float32, bucket_bytes=BUCKET, wait_s=TIMEOUT_S)
        others = [context.Process(target=receiver, args=(board, f"w{i}"), daemon=True) for i in range(receivers)]
        for process in others:
            process.start()
        for version in range(rounds + 2):
            started, clock = time.time(), time.perf_counter()
            stats = publisher.publish(version, model.items())
            held = time.perf_counter() - clock
            served, load_s = wait_all(board, version, receivers)
            time.sleep(0.05)
            rows.append((held, stats.gather_s, publisher.stats()["weights/wire_s"], load_s, served - started))
        publisher.close()
        for process in others:
            process.kill()
            process.join(10)
    names = ("publish_held_s", "gather_s", "wire_s", "load_s", "publish_to_served_s")
    medians = {
        name: round(statistics.median(column), 5)
        for name, column in zip(names, zip(*rows[2:], strict=True), strict=True)
    }
    nbytes = sum(tensor.nbytes for tensor in model.values())
    return {"parameters": parameters, "bytes": nbytes, **medians}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=int, nargs="+", default=[150_000, 10_000_000, 100_000_000])
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for parameters in args.parameters:
        row = measure(parameters, args.receivers, args.rounds)
        bare = bare_broadcast(int(row["bytes"]), args.receivers, args.rounds)
        results.append(row | {"bare_broadcast_s": round(bare, 5)})
    print(json.dumps({"benchmark": "weights", "receivers": args.receivers, "results": results}))


if __name__ == "__main__":
    main()
