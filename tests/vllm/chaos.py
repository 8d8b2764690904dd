"""Kill or freeze the worker, vLLM's own process or the learner in each phase of an update, with real engines.

    python -m tests.vllm.chaos [--only core]      all injections, one after another; one line of JSON each

A learner publishes continuously to a steady vLLM worker, a steady transformers worker, and a vLLM victim. It measures
the time until the steady workers serve a newer version, and until the victim or its successor does. All the time every
worker compares its answers with a plain forward of the version they claim: no answer may mix two versions.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import psutil

from tests.forked import forked_from
from tests.vllm.chaos_processes import engine_process, learner_process
from tests.vllm.models import engine_config
from tests.waiting import until
from tests.weights.board import BoardManager
from tests.weights.trap import Injection

START_S = 240.0
MAX_VICTIMS = 3
WORKER_KILLS = (
    "before accept", "after accept", "staging", "before load", "paused", "prove", "before ack", "after ack",
)  # fmt: skip
WORKER_STOPS = ("before accept", "staging", "before load", "paused", "prove", "before ack")
CORE_KILLS = ("join", "bucket 0", "bucket 3", "fingerprint", "mid load", "after load")
CORE_STOPS = ("join", "bucket 3", "fingerprint", "mid load", "after load")
LEARNER_KILLS = ("after invite", "before go", "after event", "bucket 3", "after prints")
INJECTIONS = (
    *(Injection("kill", "worker", phase) for phase in WORKER_KILLS),
    *(Injection("stop", "worker", phase) for phase in WORKER_STOPS),
    *(Injection("kill", "core", phase) for phase in CORE_KILLS),
    *(Injection("stop", "core", phase) for phase in CORE_STOPS),
    *(Injection("kill", "learner", phase) for phase in LEARNER_KILLS),
)
SHORT = tuple(i for i in INJECTIONS if i.name in ("stop@worker: before ack", "stop@core: mid load"))


class VictimEndedError(Exception):
    """The victim has ended and has to be replaced."""


class Cluster:
    """A learner, steady workers and the victim `v`.

    Args:
        steady: worker -> engine.
        slack_s: seconds added to the limit for a busy machine.
    """

    def __init__(self, board: Any, folder: Path, timeout_s: float, steady: dict[str, str], slack_s: float) -> None:
        self.board, self._folder, self._timeout_s, self._slack_s = board, folder, timeout_s, slack_s
        self.steady = tuple(steady)
        self._config = engine_config(folder / "model", "qwen3")
        self._config.weights.timeout_s = timeout_s
        self._context = forked_from("tests.vllm.chaos_processes")
        self._started: list[Any] = []
        self._incarnation, self._fired = 0, 0
        self._seen: dict[int, psutil.Process] = {}
        self.learner = self._start_learner(None)
        for name, engine in steady.items():
            self._start_worker(name, "1", engine)
        self.victim = self._start_victim()

    @property
    def limit_s(self) -> float:
        """Limit in seconds on a recovery: an engine that does not answer is waited for twice in a load; then come the
        acknowledgement, a group without it, and twice the publisher's grace."""
        return 4 * self._timeout_s + 2 * 2.0 + 10.0 + self._slack_s

    def inject(self, injection: Injection) -> dict[str, Any]:
        self.wait_all_serve()
        self._fired += 1
        fired = self._folder / f"fired-{self._fired}"
        if injection.who == "learner":
            self.learner.kill()
            self._start_learner(injection, str(fired))
            self._wait(fired.exists, START_S, f"{injection.name} came to pass")
        else:
            for _ in range(MAX_VICTIMS):
                self._strike(injection, fired)
                if fired.exists():
                    break
                self.wait_all_serve()
            assert fired.exists(), f"{MAX_VICTIMS} victims ended before {injection.name}: {self.board.notes('ended')}"
        steady_s = self.wait_newer(self.steady, self.limit_s) if injection.who != "learner" else 0.0
        return {"injection": injection.name, "steady_s": round(steady_s, 2), **self._recover(injection)}

    def _strike(self, injection: Injection, fired: Path) -> None:
        """Arm the trap in the victim and wait until it fires, or until the victim ends first: on a stalled machine its
        engine may seem not to answer."""

        def ended() -> bool:
            return not self.victim.is_alive()

        self._note_processes()
        armed = len(self.board.notes("armed"))
        self.board.note(f"arm/v/{self._incarnation}", (injection, str(fired)))
        self._wait(lambda: len(self.board.notes("armed")) > armed or ended(), START_S, "the trap is armed")
        if injection.phase.split()[-1] in ("accept", "join"):
            self.learner.kill()  # workers say hello again to a new one
            self._start_learner(None)
        self._wait(lambda: fired.exists() or ended(), START_S, f"{injection.name} came to pass")

    def wait_all_serve(self) -> None:
        """Wait until all workers serve. A victim that has ended is replaced, as the pool would do."""
        for _ in range(MAX_VICTIMS):
            if not self.victim.is_alive():
                self._start_victim()
            try:
                self.wait_newer(("v", *self.steady), START_S, while_alive=self.victim)
                return
            except VictimEndedError:
                self.board.leave("v", str(self._incarnation))
        raise AssertionError(f"{MAX_VICTIMS} victims ended before they served: {self.board.notes('ended')}")

    def _recover(self, injection: Injection) -> dict[str, Any]:
        """Do what the pool would do, and measure the time until the victim serves again."""
        started = time.monotonic()
        if injection.who == "learner":
            self.learner.join(30)
            self._start_learner(None)
        elif (injection.who, injection.action) == ("worker", "stop"):
            os.kill(self.victim.pid, signal.SIGCONT)
        else:
            self.victim.join(self.limit_s)
            assert not self.victim.is_alive(), f"the worker did not end within {self.limit_s} s: {injection.name}"
        try:
            # A victim frozen beyond its own deadlines may conclude, once resumed, that its engine did not answer.
            took = self.wait_newer(("v", *self.steady), self.limit_s, while_alive=self.victim)
        except VictimEndedError:
            return {"victim": self._how_it_ended(injection), "ended_s": round(time.monotonic() - started, 2)}
        return {"victim": "serves on", "victim_s": round(took, 2)}

    def _how_it_ended(self, injection: Injection) -> str:
        """Return the victim's last error, or "killed", after checking that none of its processes is left."""
        _, left = psutil.wait_procs([p for pid, p in self._seen.items() if pid != self.victim.pid], timeout=60)
        assert not left, f"{injection.name} left {left}"
        ended = [e for who, number, e in self.board.notes("ended") if (who, number) == ("v", str(self._incarnation))]
        killed = (injection.action, injection.who) == ("kill", "worker")
        assert killed != bool(ended) and all("EngineDiedError" in error for error in ended), ended
        self.board.leave("v", str(self._incarnation))
        return ended[0] if ended else "killed"

    def wait_newer(self, workers: Sequence[str], limit_s: float, while_alive: Any = None) -> float:
        """Return the seconds until each of `workers` serves a version newer than all served before now.

        Raises:
            VictimEndedError: the process `while_alive` has ended.
        """
        started, served = time.monotonic(), self.board.served()
        newest = max((version for _, version, _, _ in served), default=-1)
        while True:
            newer = {worker for worker, version, _, _ in self.board.served()[len(served) :] if version > newest}
            took = time.monotonic() - started
            if set(workers) <= newer:
                return took
            if while_alive is not None and not while_alive.is_alive():
                raise VictimEndedError
            missing = sorted(set(workers) - newer)
            assert took < limit_s, f"after {limit_s} s: {missing} serve nothing newer; {self.board.notes('ended')}"
            time.sleep(0.05)

    def check(self) -> dict[str, int]:
        """Check that no answer mixed versions, that each version had one fingerprint in all workers, and that no steady
        worker ended."""
        assert not self.board.notes("mixed"), self.board.notes("mixed")[:3]
        assert {who for who, _, _ in self.board.notes("ended")} <= {"v"}, self.board.notes("ended")
        prints: dict[int, set[str]] = {}
        for _, version, fingerprint, _ in self.board.served():
            prints.setdefault(version, set()).add(fingerprint)
        assert all(len(found) == 1 for found in prints.values())
        answers = {worker: sum(self.board.notes(f"answers/{worker}")) for worker in ("v", *self.steady)}
        assert all(answers.values()), answers
        return {"versions_served": len(prints), "loads": len(self.board.served()), "answers": sum(answers.values())}

    def close(self) -> None:
        """Kill everything. vLLM's processes end with their owners, except those that are stopped."""
        for process in self._started:
            if process.is_alive():
                self._seen |= {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
            process.kill()
            process.join(10)
        for process in self._seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # psutil checks that the pid still belongs to the same process

    def _start_victim(self) -> Any:
        self._incarnation += 1
        self.victim = self._start_worker("v", str(self._incarnation), "vllm")
        return self.victim

    def _start_worker(self, name: str, incarnation: str, engine: str) -> Any:
        config = deepcopy(self._config)
        config.engine.name, config.engine.kv_cache_mb = engine, 64 if engine == "vllm" else 0
        return self._start(engine_process, self.board, name, incarnation, config)

    def _start_learner(self, injection: Injection | None, fired: str = "") -> Any:
        first = max(self.board.notes("published"), default=-1) + 3  # a version in transfer is not noted yet
        self.learner = self._start(learner_process, self.board, first, self._timeout_s, injection, fired)
        return self.learner

    def _start(self, target: Callable[..., None], *arguments: Any) -> Any:
        process = self._context.Process(target=target, args=arguments)
        process.start()
        self._started.append(process)
        return process

    def _note_processes(self) -> None:
        self._seen = {child.pid: child for child in psutil.Process(self.victim.pid).children(recursive=True)}

    def _wait(self, what: Callable[[], bool], limit_s: float, why: str) -> None:
        until(what, lambda: f"not within {limit_s} s: {why}; {self.board.notes('ended')}", within_s=limit_s)


@contextmanager
def cluster(folder: Path, timeout_s: float, steady: dict[str, str], slack_s: float = 0.0) -> Iterator[Cluster]:
    with BoardManager() as manager:
        running = Cluster(manager.Board(), folder, timeout_s, steady, slack_s)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield running
        finally:
            running.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="part of the name of the injections to run")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first so many")
    parser.add_argument("--timeout", type=float, default=8.0, help="weights.timeout_s")
    given = parser.parse_args()
    steady = {"a": "transformers", "b": "vllm"}
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder), given.timeout, steady) as running:
        for injection in INJECTIONS[given.skip :]:
            if given.only in injection.name:
                row = running.inject(injection) | running.check()
                print(json.dumps(row | {"limit_s": running.limit_s}), flush=True)
        running.wait_all_serve()
        print(json.dumps(running.check()), flush=True)


if __name__ == "__main__":
    main()
