"""What does a publication cost, by phase, beside a bare broadcast of the same bytes?

    python benchmarks/weights.py [--parameters 10000000 100000000 500000000] [--receivers 1] [--rounds 5]

One learner process, receivers in processes of their own, gloo on loopback. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping
from multiprocessing.managers import BaseManager
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from asyncrl.engines.parameters import ParameterTable
from asyncrl.schema import WeightsConfig
from asyncrl.weights.broadcast_publisher import BroadcastSender
from asyncrl.weights.broadcast_subscriber import BroadcastSubscriber
from asyncrl.weights.fingerprint import bucket_fingerprint
from asyncrl.weights.group import WeightGroup, connect_store, host_store
from asyncrl.weights.snapshot import BackgroundPublisher

TIMEOUT_S = 60.0


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


class Table(torch.nn.Module):
    """Like a transformer of so many parameters: 12 tensors per layer, 2 to 24 layers."""

    def __init__(self, parameters: int, *, random: bool) -> None:
        super().__init__()
        layers = 2 if parameters < 1_000_000 else 24
        each = parameters // (layers * 12)
        make = torch.randn if random else torch.zeros
        self.layers = torch.nn.ModuleList(
            torch.nn.ParameterDict({f"w{j}": torch.nn.Parameter(make(each), requires_grad=False) for j in range(12)})
            for _ in range(layers)
        )


def receiver(board: Any, worker: str, parameters: int) -> None:
    torch.set_num_threads(1)
    loads: list[float] = []
    table = ParameterTable(Table(parameters, random=False))

    def load(_: int, tensors: Mapping[str, torch.Tensor]) -> None:
        table.check(tensors)
        started = time.perf_counter()
        table.load(tensors)
        loads.append(time.perf_counter() - started)

    board.join(worker)
    subscriber = BroadcastSubscriber(
        Rendezvous(board, loads), load, worker=worker, incarnation="1", timeout_s=TIMEOUT_S
    )
    time.sleep(3600)
    subscriber.close()


def chunks(nbytes: int, bucket: int) -> list[torch.Tensor]:
    return [torch.zeros(min(bucket, nbytes - start), dtype=torch.uint8) for start in range(0, nbytes, bucket)]


def bare_receiver(port: int, rank: int, world: int, nbytes: int, rounds: int, bucket: int) -> None:
    torch.set_num_threads(1)
    store = connect_store("127.0.0.1", port, TIMEOUT_S)
    group = WeightGroup(store, backend="gloo", host="127.0.0.1", epoch=0, rank=rank, world=world, timeout_s=TIMEOUT_S)
    buffers = chunks(nbytes, bucket)
    for _ in range(rounds):
        for buffer in buffers:
            group.wait(group.broadcast(buffer))


def bare_broadcast(nbytes: int, receivers: int, rounds: int, bucket: int) -> list[float]:
    """Seconds of broadcasting `nbytes` in the same buckets, with nothing else."""
    store, port = host_store("127.0.0.1", TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=bare_receiver, args=(port, rank, receivers + 1, nbytes, rounds + 1, bucket), daemon=True)
        for rank in range(1, receivers + 1)
    ]
    for process in others:
        process.start()
    group = WeightGroup(
        store, backend="gloo", host="127.0.0.1", epoch=0, rank=0, world=receivers + 1, timeout_s=TIMEOUT_S
    )
    buffers = chunks(nbytes, bucket)
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        for buffer in buffers:
            group.wait(group.broadcast(buffer))
        seconds.append(time.perf_counter() - started)
    for process in others:
        process.join(30)
    return seconds[1:]


def wait_all(board: Any, version: int, receivers: int) -> tuple[float, float]:
    """(time the last receiver served it, its load seconds)."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        found = [(when, load_s) for what, when, load_s in board.recorded() if what == version]
        if len(found) == receivers:
            return max(found)
        time.sleep(0.002)
    raise TimeoutError(f"version {version} was not served by {receivers} receivers in {TIMEOUT_S} s")


def fingerprint_seconds(nbytes: int, bucket: int) -> float:
    buffers = chunks(nbytes, bucket)
    started = time.perf_counter()
    for buffer in buffers:
        bucket_fingerprint(buffer)
    return time.perf_counter() - started


def measure(parameters: int, receivers: int, rounds: int, bucket: int) -> dict[str, float]:
    """Medians over `rounds` updates, with as many bare broadcasts before and after."""
    context = multiprocessing.get_context("spawn")
    model = dict(Table(parameters, random=True).named_parameters())
    nbytes = sum(tensor.nbytes for tensor in model.values())
    bare = bare_broadcast(nbytes, receivers, rounds, bucket)
    rows = []
    with BoardManager() as manager:
        board = manager.Board()  # pyright: ignore
        sender = BroadcastSender(board, host="127.0.0.1", timeout_s=TIMEOUT_S)
        publisher = BackgroundPublisher(sender, wire_dtype=torch.float32, bucket_bytes=bucket, wait_s=TIMEOUT_S)
        others = [
            context.Process(target=receiver, args=(board, f"w{i}", parameters), daemon=True) for i in range(receivers)
        ]
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
    bare += bare_broadcast(nbytes, receivers, rounds, bucket)
    names = ("learner_stall_s", "gather_s", "wire_s", "engine_stall_s", "update_s")
    medians = dict(zip(names, map(statistics.median, zip(*rows[2:], strict=True)), strict=True))
    medians |= {"bare_broadcast_s": statistics.median(bare), "fingerprint_s": fingerprint_seconds(nbytes, bucket)}
    ratios = {
        "beyond_gather_over_bare": (medians["update_s"] - medians["gather_s"]) / medians["bare_broadcast_s"],
        "engine_stall_over_update": medians["engine_stall_s"] / medians["update_s"],
        "learner_stall_over_update": medians["learner_stall_s"] / medians["update_s"],
        "fingerprint_over_wire": medians["fingerprint_s"] / medians["wire_s"],
    }
    rounded = {name: float(f"{value:.4g}") for name, value in (medians | ratios).items()}
    return {"parameters": parameters, "bytes": nbytes, **rounded}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=int, nargs="+", default=[10_000_000, 100_000_000, 500_000_000])
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--bucket-mb", type=int, default=WeightsConfig().bucket_mb)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(parameters, args.receivers, args.rounds, args.bucket_mb << 20) for parameters in args.parameters]
    print(json.dumps({"benchmark": "weights", "receivers": args.receivers, "results": results}))


if __name__ == "__main__":
    main()
