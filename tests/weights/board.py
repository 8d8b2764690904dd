"""The rendezvous of the tests: a board, a member list and a log of served versions behind a multiprocessing manager."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.managers import BaseManager
from typing import Any


@dataclass(frozen=True)
class Member:
    worker: str
    incarnation: str
    policy_version: int = -1


@dataclass(frozen=True)
class View:
    revision: int
    values: dict[str, Any]


class Board:
    """Everything that publisher and subscribers need. It lives in the manager's process."""

    def __init__(self) -> None:
        self._revision = 0
        self._values: dict[str, Any] = {}
        self._members: dict[tuple[str, str], int] = {}
        self._served: list[tuple[str, int, str, float]] = []
        self._notes: list[tuple[str, Any]] = []

    def announce(self, values: dict[str, Any]) -> None:
        self._values |= values
        self._revision += 1

    def view(self) -> tuple[int, dict[str, Any]]:
        return self._revision, dict(self._values)

    def join(self, worker: str, incarnation: str) -> None:
        self._members[worker, incarnation] = -1

    def leave(self, worker: str, incarnation: str) -> None:
        self._members.pop((worker, incarnation), None)

    def members(self) -> list[Member]:
        return [Member(*peer, version) for peer, version in self._members.items()]

    def record_served(self, worker: str, version: int, fingerprint: str) -> None:
        self._served.append((worker, version, fingerprint, time.time()))

    def served(self) -> list[tuple[str, int, str, float]]:
        return list(self._served)

    def note(self, key: str, value: Any) -> None:
        self._notes.append((key, value))

    def notes(self, key: str) -> list[Any]:
        return [value for name, value in self._notes if name == key]


def end_with_tests() -> None:
    """End this process once the process of the tests has ended, killed or not. Otherwise it would sample or wait for
    ever.

    The kernel's signal at the parent's death is not enough: the parent of a forked process is the forkserver, which
    outlives the tests as long as one of its children holds its pipe.
    """
    tests = parent_process()
    assert tests is not None

    def watch() -> None:
        """Waits for the process of the tests; unblocked by its end."""
        tests.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class BoardManager(BaseManager):
    """A manager in a spawned process. A forked one would inherit process groups without their threads, and abort when
    it collects them."""

    def __init__(self) -> None:
        super().__init__(ctx=get_context("spawn"))

    def start(self, initializer: Any = None, initargs: tuple[Any, ...] = ()) -> None:
        super().start(initializer or end_with_tests, initargs)


BoardManager.register("Board", Board)


class WorkerRendezvous:
    """Subscriber side; implements `weights.base.SubscriberRendezvous` over the shared board."""

    def __init__(self, board: Any, worker: str) -> None:
        self._board, self._worker = board, worker

    def watch(self, revision: int, wait_s: float) -> View:
        deadline = time.monotonic() + min(wait_s, 0.05)  # it may return early: a subscriber that closes waits for it
        while True:
            now, values = self._board.view()
            if now != revision or time.monotonic() > deadline:
                return View(now, values)
            time.sleep(0.01)

    def served(self, policy_version: int, fingerprint: str) -> None:
        self._board.record_served(self._worker, policy_version, fingerprint)
