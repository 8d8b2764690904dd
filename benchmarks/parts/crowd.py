"""Simulated engines: the real sender, the real subscribers (many per process), and groups that carry no bytes.

The cost that remains is that of an update besides the weights: the messages of `asyncrl.weights.broadcast.protocol`.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from asyncrl.weights.broadcast import publisher as publisher_module
from asyncrl.weights.broadcast.group import WeightGroup
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.staging import Seat
from asyncrl.weights.broadcast.subscriber import BroadcastSubscriber
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.fingerprint import Fingerprint
from asyncrl.weights.publishing.publisher import WeightPublisher
from benchmarks.parts.board import TIMEOUT_S, Member, View

WEIGHT = torch.zeros(16)
IDLE_S = 5.0
_PER_PROCESS = 128


class NoBytes(WeightGroup):
    """A weight group that sends nothing."""

    def __init__(self, store: Any, link: Link, **settings: Any) -> None:
        self.epoch, self.timeout_s = settings["epoch"], link.timeout_s

    def pieces(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        return iter(())

    def abort(self) -> None: ...


class Receives:
    """An `asyncrl.weights.broadcast.staging.Receiver` that always reports the fingerprint of what was sent."""

    width = 1

    def wanted(self) -> tuple[()]:
        return ()

    def join(self, seat: Seat) -> None: ...

    def receive(self, event: Mapping[str, Any]) -> list[str]:
        return [Fingerprint().hex()]

    def staged(self) -> dict[str, torch.Tensor]:
        return {}

    def changed(self) -> bool:
        return False

    def leave(self) -> None: ...


class Meeting:
    """The rendezvous of both ends. All members are present from the start, and the board does not change."""

    def __init__(self, members: int) -> None:
        self.values: dict[str, Any] = {}
        self._members = [Member(f"w{number}", "1", -1) for number in range(members)]

    def announce(self, values: dict[str, Any]) -> None:
        self.values = values

    def members(self) -> list[Member]:
        return self._members

    def watch(self, revision: int, wait_s: float) -> View:
        return View(1, self.values)

    def served(self, policy_version: int, fingerprint: str) -> None: ...


def crowd(values: dict[str, Any], first: int, count: int) -> None:
    torch.set_num_threads(1)
    meeting = Meeting(0)
    meeting.announce(values)
    for number in range(first, first + count):
        BroadcastSubscriber(
            meeting, lambda *_: None, worker=f"w{number}", incarnation="1", timeout_s=TIMEOUT_S, receiver=Receives()
        )
    threading.Event().wait(3600)


def control_cost(members: int, updates: int, idle_s: float = IDLE_S) -> dict[str, float]:
    """Return the costs of the learner's rank 0 with `members` members: cores when nothing is sent, and seconds and CPU
    seconds of an update.

    The simulated members run on the same machine. `update_s` includes their time, `update_cpu_s` does not.
    """
    publisher_module.WeightGroup = NoBytes
    meeting = Meeting(members)
    sender = BroadcastSender(meeting, Link(host="127.0.0.1", timeout_s=TIMEOUT_S))
    publisher = WeightPublisher(sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    crowds = [
        context.Process(target=crowd, args=(meeting.values, first, min(_PER_PROCESS, members - first)), daemon=True)
        for first in range(0, members, _PER_PROCESS)
    ]
    for process in crowds:
        process.start()
    rows = []
    try:
        publisher.publish(0, [("w", WEIGHT)])
        _until(lambda: publisher.stats()["weights/engines"] == members, f"{members} members are in the group")
        for version in range(1, updates + 1):
            cpu = time.process_time()
            publisher.publish(version, [("w", WEIGHT)])
            _until(lambda version=version: publisher.stats()["weights/sent_version"] == version, f"{version} is served")
            rows.append((publisher.stats()["weights/update_s"], time.process_time() - cpu))
        cpu = time.process_time()
        time.sleep(idle_s)
        idle = (time.process_time() - cpu) / idle_s
    finally:
        publisher.close()
        for process in crowds:
            process.kill()
            process.join(10)
    seconds, cpus = (statistics.median(values) for values in zip(*rows, strict=True))
    return {"members": members, "idle_cores": idle, "update_s": seconds, "update_cpu_s": cpus}


def _until(true: Any, what: str) -> None:
    deadline = time.monotonic() + 3 * TIMEOUT_S
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {3 * TIMEOUT_S} s until {what}")
        time.sleep(0.01)
