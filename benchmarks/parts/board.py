"""The board through which publisher and receivers meet in the benchmarks of weights. It has a process of its own."""

from __future__ import annotations

import threading
import time
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from typing import Any, NamedTuple

TIMEOUT_S = 60.0
"""Limit in seconds on the time until a version is served."""


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
        self.recorded = threading.Condition()

    def announce(self, values: dict[str, Any]) -> None:
        self.revision, self.values = self.revision + 1, self.values | values

    def view(self) -> tuple[int, dict[str, Any]]:
        return self.revision, self.values

    def join(self, worker: str) -> None:
        self.peers.append(worker)

    def members(self) -> list[Member]:
        return [Member(worker, "1", -1) for worker in self.peers]

    def record(self, version: int, when: float, load_s: float) -> None:
        with self.recorded:
            self.times.append((version, when, load_s))
            self.recorded.notify_all()

    def served(self, version: int, receivers: int, wait_s: float) -> list[tuple[float, float]]:
        """Return (time, load seconds) of each receiver that serves `version`. Waits up to `wait_s` for all of them."""

        def found() -> list[tuple[float, float]]:
            return [(when, load_s) for what, when, load_s in self.times if what == version]

        with self.recorded:
            self.recorded.wait_for(lambda: len(found()) == receivers, wait_s)
            return found()


class BoardManager(BaseManager):
    """Manager of boards in a spawned process. A forked one would inherit process groups without their threads, and
    abort when it collects them."""

    def __init__(self) -> None:
        super().__init__(ctx=get_context("spawn"))


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
