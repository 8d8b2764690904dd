"""Kill or freeze workers and learner in every phase of a weight update.

    python -m tests.weights.chaos [--only kill@load]      all injections, one after another; one line of JSON each

A learner publishes continuously to two steady workers. Each injection adds a victim (or replaces the learner) that
kills or stops itself at a given moment. It measures the time until every steady worker serves a newer version. All the
time every worker checks that it never serves tensors of two versions.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from tests.forked import forked_from
from tests.waiting import until
from tests.weights.board import BoardManager
from tests.weights.chaos_processes import TIMEOUT_S, learner_process, worker_process
from tests.weights.trap import Injection

LIMIT_S = 3 * TIMEOUT_S + 2 * 2.0
"""Limit in seconds on the recovery: one timeout each for the broadcast with the silent peer, for its acknowledgement
and for a group formed without it, and twice the publisher's grace."""
STEADY = ("a", "b")
WORKER_PHASES = (
    "before hello", "after hello", "before accept", "after accept", "bucket 0", "bucket 3", "fingerprint",
    "before load", "mid load", "after load", "before ack", "after ack",
)  # fmt: skip
LEARNER_PHASES = ("after invite", "before go", "after event", "bucket 0", "bucket 3", "after prints")
INJECTIONS = (
    *(Injection("kill", "worker", phase) for phase in WORKER_PHASES),
    *(Injection("stop", "worker", phase) for phase in WORKER_PHASES if not phase.startswith("after a")),
    *(Injection("kill", "learner", phase) for phase in LEARNER_PHASES),
    *(
        Injection("kill", "worker", phase, ipc=True)
        for phase in ("after accept", "bucket 3", "fingerprint", "mid load")
    ),
    Injection("stop", "worker", "bucket 3", ipc=True),
    *(Injection("kill", "learner", phase, ipc=True) for phase in ("after event", "bucket 3", "after prints")),
    *(Injection("kill", "worker", phase, files=True) for phase in ("block 3", "mid load")),
    Injection("stop", "worker", "block 3", files=True),
    Injection("kill", "learner", "mid file", files=True),
    Injection("kill", "worker", "block 0", files=True, delta=True),
    Injection("kill", "learner", "mid file", files=True, delta=True),
)
_SHORT_NAMES = (
    "kill@worker: before accept", "kill@worker: mid load", "stop@worker: bucket 3", "kill@learner: bucket 3",
    
    "kill@worker: bucket 3 (ipc)", "kill@learner: bucket 3 (ipc)", 
    "kill@worker: block 3 (files)", "kill@learner: mid file (files)",
)  # fmt: skip
SHORT = tuple(injection for injection in INJECTIONS if injection.name in _SHORT_NAMES)


@dataclass(frozen=True)
class Kind:
    """A kind of transfer. Injections of the same kind share a cluster."""

    delta: bool
    ipc: bool
    files: bool

    @classmethod
    def of(cls, injection: Injection) -> Kind:
        return cls(injection.delta, injection.ipc, injection.files)

    @property
    def name(self) -> str:
        kind = "delta" if self.delta else "full"
        return kind + (" by ipc" if self.ipc else "") + (" by files" if self.files else "")


def context_of(device: str, module: str) -> Any:
    """Return the context for processes that compute on `device`. They are spawned for CUDA, which cannot be used after
    a fork if the parent has initialized it."""
    return get_context("spawn") if device.startswith("cuda") else forked_from(module)


class Cluster:
    def __init__(self, board: Any, kind: Kind, limit_s: float, device: str = "cpu") -> None:
        self.board, self._limit_s, self._device = board, limit_s, device
        self._delta, self._backend = "always" if kind.delta else "never", "ipc" if kind.ipc else "sockets"
        self._folder = tempfile.mkdtemp() if kind.files else ""
        self._context = context_of(device, "tests.weights.chaos_processes")
        self.processes: list[Any] = []
        self.learner = self.start_learner(None)
        for name in STEADY:
            self.start_worker(name, "1", None)

    def start_worker(self, name: str, incarnation: str, injection: Injection | None) -> Any:
        return self._start(worker_process, self.board, name, incarnation, injection, self._device, bool(self._folder))

    def start_learner(self, injection: Injection | None) -> Any:
        """Start a learner, after the end of the one before it."""
        if (before := getattr(self, "learner", None)) is not None:
            before.kill()
            before.join(30)
        first = max(self.board.notes("published"), default=-1) + 3  # a version in transfer is not noted yet
        how = (self._delta, self._backend, self._device, self._folder)
        self.learner = self._start(learner_process, self.board, first, injection, *how)
        return self.learner

    def _start(self, target: Callable[..., None], *arguments: Any) -> Any:
        process = self._context.Process(target=target, args=arguments, daemon=True)
        process.start()
        self.processes.append(process)
        return process

    def wait_newer(self, workers: tuple[str, ...], since: float, limit_s: float) -> float:
        """Return the seconds from `since` until each of `workers` serves a version newer than all served before."""
        newest = max((version for _, version, _, when in self.board.served() if when <= since), default=-1)
        while time.time() - since < limit_s:
            times = {w: when for w, version, _, when in reversed(self.board.served()) if version > newest + 1}
            if set(workers) <= set(times):
                return max(times[worker] for worker in workers) - since
            time.sleep(0.02)
        last = {worker: [v for w, v, _, _ in self.board.served() if w == worker][-3:] for worker in workers}
        raise AssertionError(f"after {limit_s} s: served {last}, failed {self.board.notes('failed')}")

    def wait(self, what: Callable[[], bool], limit_s: float, why: str) -> None:
        until(what, lambda: f"not within {limit_s} s: {why}; {self.board.notes('failed')}", within_s=limit_s)

    def inject(self, injection: Injection, number: int) -> float:
        """Run one injection. Wait until the steady workers, and the victim or its successor, serve newer versions.

        Returns:
            Seconds until the steady workers did.
        """
        before = len(self.board.notes("fired"))
        victim, name = None, f"v{number}"
        if injection.who == "worker":
            victim = self.start_worker(name, "1", injection)
        else:
            self.start_learner(injection)
        self.wait(lambda: len(self.board.notes("fired")) > before, 120.0, f"{injection.name} came to pass")
        fired = self.board.notes("fired")[-1]
        if victim is None:
            self.start_learner(None)
            return self.wait_newer(STEADY, fired, self._limit_s)
        took = self.wait_newer(STEADY, fired, self._limit_s)
        if injection.action == "kill":
            victim.join(30)
            self.board.leave(name, "1")
            victim, incarnation = self.start_worker(name, "2", None), "2"
        else:
            os.kill(victim.pid, signal.SIGCONT)
            incarnation = "1"
        self.wait_newer((name, *STEADY), time.time(), 4 * self._limit_s)
        self.board.note(f"stop/{name}", True)
        victim.join(60)
        self.board.leave(name, incarnation)
        return took

    def check(self) -> dict[str, int]:
        """Check that there were no mixed weights and no failed canary, that each version had one fingerprint in all
        workers, and that versions only grew."""
        assert not self.board.notes("mixed"), self.board.notes("mixed")[:3]
        assert not self.board.notes("failed"), self.board.notes("failed")[:3]
        served = self.board.served()
        prints: dict[int, set[str]] = {}
        for _, version, fingerprint, _ in served:
            prints.setdefault(version, set()).add(fingerprint)
        assert all(len(found) == 1 for found in prints.values())
        for worker in STEADY:
            versions = [version for who, version, _, _ in served if who == worker]
            assert versions == sorted(set(versions))
        return {"versions_served": len(prints), "loads": len(served)}

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)
        if self._folder:
            shutil.rmtree(self._folder)


@contextmanager
def cluster(kind: Kind, limit_s: float, device: str) -> Iterator[Cluster]:
    with BoardManager() as manager:
        running = Cluster(manager.Board(), kind, limit_s, device)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            running.wait_newer(STEADY, time.time(), 120.0)
            yield running
        finally:
            running.close()


def run(
    injections: tuple[Injection, ...],
    report: Callable[[dict[str, Any]], None],
    limit_s: float = LIMIT_S,
    device: str = "cpu",
) -> None:
    """Run the injections and pass a row for each to `report`.

    Args:
        limit_s: seconds in which each must recover.
        device: device of learner and workers, which share it.

    Raises:
        AssertionError: an injection did not recover within `limit_s`.
    """
    for kind in dict.fromkeys(Kind.of(injection) for injection in injections):
        with cluster(kind, limit_s, device) as running:
            for number, injection in enumerate(each for each in injections if Kind.of(each) == kind):
                took = running.inject(injection, number)
                report({"injection": injection.name, "recovered_s": round(took, 2), "limit_s": limit_s})
            report({"transfers": kind.name, **running.check()})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="part of the name of the injections to run")
    only = parser.parse_args().only
    run(tuple(i for i in INJECTIONS if only in i.name), lambda row: print(json.dumps(row), flush=True))


if __name__ == "__main__":
    main()
