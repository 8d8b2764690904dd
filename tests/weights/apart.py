"""Workers whose machines reach the learner's but not each other's, each in a network namespace of its own.

unshare -rn python -m tests.weights.apart SECONDS WAY     prints as JSON which version each worker served when

WAY: `drop` (packets between them vanish), `refuse` (no route between them)
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.subscriber import BroadcastSubscriber
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.publishing.publisher import WeightPublisher
from tests.integration.far import enter, other_network
from tests.weights.board import BoardManager, WorkerRendezvous, end_with_tests

HOST = "10.77.0.1"
WORKERS = 3
"""The first two do not reach each other; the third reaches all."""
TIMEOUT_S = 8.0
EVERY_S = 0.5


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


def connect(number: int) -> int:
    """Create the namespace of a worker, at 10.77.NUMBER.2, with a link to this one; returns its descriptor."""
    here, there = os.open("/proc/thread-self/ns/net", os.O_RDONLY), other_network()
    ip(f"link add here{number} type veth peer name there{number}")
    ip(f"addr add 10.77.{number}.1/24 dev here{number}")
    ip(f"link set here{number} up")
    subprocess.run(
        ["ip", "link", "set", f"there{number}", "netns", f"/proc/self/fd/{there}"], check=True, pass_fds=[there]
    )
    enter(there)
    ip("link set lo up")
    ip(f"addr add 10.77.{number}.2/24 dev there{number}")
    ip(f"link set there{number} up")
    ip(f"route add default via 10.77.{number}.1")
    enter(here)
    return there


def part(networks: list[int], way: str) -> None:
    """Separate the first two workers: the learner's machine forwards packets, but not theirs to each other."""
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    if way == "refuse":
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        for network, other in zip(networks[:2], ("10.77.2.0/24", "10.77.1.0/24"), strict=True):
            enter(network)
            ip(f"route add unreachable {other}")
        enter(here)
        return
    for number, other in ((1, 2), (2, 1)):
        ip(f"rule add iif here{number} to 10.77.{other}.0/24 priority 100 blackhole")


def worker_process(board: Any, name: str, network: int) -> None:
    end_with_tests()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(message)s", force=True)
    enter(network)
    torch.set_num_threads(1)
    subscriber = BroadcastSubscriber(
        WorkerRendezvous(board, name), lambda *_: None, worker=name, incarnation="1", timeout_s=TIMEOUT_S
    )
    while True:
        subscriber.check()
        time.sleep(0.1)


def main(seconds: float, way: str) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s learner %(message)s")
    torch.set_num_threads(1)
    ip("link set lo up")
    ip(f"addr add {HOST}/32 dev lo")
    networks = [connect(number) for number in range(1, WORKERS + 1)]
    part(networks, way)
    with ExitStack() as kept:
        board = kept.enter_context(BoardManager()).Board()  # pyright: ignore[reportAttributeAccessIssue]
        for number, network in enumerate(networks):
            board.join(f"w{number}", "1")  # here, for the order: the two that do not reach each other are neighbours
            process = get_context("fork").Process(
                target=worker_process, args=(board, f"w{number}", network), daemon=True
            )
            process.start()
            kept.callback(process.kill)
        sender = BroadcastSender(board, Link(host=HOST, timeout_s=TIMEOUT_S), poll_members_s=0.2)
        publisher = WeightPublisher(sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=600.0)
        began, version = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            publisher.publish(version, [("w", torch.full((1 << 20,), float(version)))])
            version += 1
            time.sleep(EVERY_S)
        served: dict[str, list[tuple[int, float]]] = {}
        first = time.time() - (time.monotonic() - began)
        for name, number, _, when in board.served():
            served.setdefault(name, []).append((number, round(when - first, 2)))
        print(
            json.dumps({"published": version, "epochs": sender.stats()["weights/epoch"], "served": served}), flush=True
        )
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2]))
