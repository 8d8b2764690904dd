"""Run real processes under faults (kills, pauses, network faults, power loss, full disk) and restart them as a
supervisor would.

Temporary faults are ended by `wait`, which every other wait goes through.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from asyncrl.utils.process_tree import dying_with_this

from .check import Verdict, check, lines
from .flip import find_flip
from .network import TO_PEER, TO_SERVER, Network
from .power import lose_power
from .settings import ChaosSettings

DRAIN_S = 120.0


class LearnerRefused(Exception):
    """The learner was refused a request, which ends it at once: only the run so far can be judged."""


class Harness:
    """One chaos run. `close` kills every process that it started."""

    def __init__(self, settings: ChaosSettings, seed: int, drain_s: float = DRAIN_S) -> None:
        self.settings, self.random, self.drain_s = settings, Random(seed), drain_s
        settings.root.mkdir(parents=True)
        settings.save()
        self.faults: Counter[str] = Counter()
        self.lost_bytes = 0
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.paused: dict[str, float] = {}
        self.complaints: list[str] = []
        self._mending: list[tuple[float, Callable[[], object]]] = []
        self.network = Network(settings.address, settings.listen, Random(seed)) if settings.listen else None
        self.names = ["server", *(f"w{n}" for n in range(settings.workers)), "learner"]

    def start(self, name: str) -> None:
        module = "worker" if name.startswith("w") else name
        with (self.settings.root / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                dying_with_this([sys.executable, "-m", f"tests.chaos.{module}", self.settings.folder, name]),
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=Path(__file__).parents[2],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def kill(self, name: str) -> None:
        process = self.processes[name]
        process.kill()
        process.wait()
        self.paused.pop(name, None)

    def power_loss(self) -> None:
        self.kill("server")
        self.lost_bytes += lose_power(self.settings.journal, self.random)

    def restart_the_dead(self) -> None:
        """Start what has not been started, and restart dead processes, including those that ended by themselves,
        unless the run is over."""
        for name in self.names:
            dead = name in self.processes and self.processes[name].poll() is not None
            if name not in self.processes or (dead and not self.finished()):
                self.start(name)

    def finished(self) -> bool:
        process = self.processes.get("learner")
        return process is not None and process.poll() == 0

    def seen(self, what: str) -> int:
        """Return how often the learner has noted `what` so far."""
        return sum(row["what"] == what for row in lines(self.settings.root / "history" / "learner.jsonl"))

    def fault(self, kind: str) -> None:
        self.faults[kind] += 1
        workers = [name for name in self.names if name.startswith("w")]
        if kind == "worker":
            self.kill(self.random.choice(workers))
        elif kind in ("server", "learner"):
            self.kill(kind)
        elif kind == "everything":
            for name in self.random.sample(self.names, len(self.names)):
                self.kill(name)
        elif kind == "power":
            self.power_loss()
        elif kind == "pause":
            name = self.random.choice(self.names)
            self.pause(name, self.random.choice((0.3, 2.5)))
        elif kind == "full":
            self.fill_disk(self.random.choice((0.3, 2.5)))
        elif kind == "corrupt":
            self.corrupt()
        else:
            self.disturb(kind)

    def disturb(self, kind: str) -> None:
        """Inject a network fault: `cut`, `delay` or `blackhole`."""
        network, random = self.network, self.random
        if network is None:
            raise ValueError(f"{kind} needs settings.listen, so that there is a relay between peers and server")
        if kind == "cut":
            network.cut(everybody=random.random() < 0.5)
        elif kind == "delay":
            network.delay(0.2)
            self.mend_after(random.choice((0.3, 1.5)), network.mend)
        elif kind == "blackhole":
            network.swallow(random.choice(((TO_SERVER,), (TO_PEER,), (TO_SERVER, TO_PEER))))
            if random.random() < 0.5:
                self.mend_after(random.choice((0.3, 2.5)), lambda: network.cut(everybody=True))
            self.mend_after(2.5, network.mend)

    def fill_disk(self, seconds: float) -> None:
        self.settings.full.touch()
        self.mend_after(seconds, lambda: self.settings.full.unlink(missing_ok=True))

    def corrupt(self) -> None:
        """Flip a durable bit while the server is down. The server must refuse to start and name file and byte. The bit
        is then restored and the run goes on."""
        for _ in range(10):
            self.kill("server")
            flip = find_flip(self.settings.journal, self.random)
            if flip is not None:
                break
            self.wait_for_steps(1)  # A server that has just started has nothing durable in its new segment yet.
        else:
            raise TimeoutError("ten servers in a row made nothing durable")
        before = len(self.said("server"))
        flip.turn()
        self.start("server")
        try:
            self.processes["server"].wait(self.drain_s)
        except subprocess.TimeoutExpired:
            self.kill("server")
        flip.turn()
        said = self.said("server")[before:]
        if f"{flip.path.name} is damaged at byte {flip.record}" not in said:
            self.complaints.append(f"{flip.path.name} was damaged at byte {flip.record}, the server said {said[-600:]}")

    def mend_after(self, seconds: float, mend: Callable[[], object]) -> None:
        self._mending.append((time.monotonic() + seconds, mend))

    def _mend(self, now: float) -> None:
        due = [mend for at, mend in self._mending if at <= now]
        self._mending = [(at, mend) for at, mend in self._mending if at > now]
        for mend in due:
            mend()

    def pause(self, name: str, seconds: float) -> None:
        self.processes[name].send_signal(signal.SIGSTOP)
        self.paused[name] = time.monotonic() + seconds

    def resume_the_paused(self) -> None:
        for name in [name for name, until in self.paused.items() if time.monotonic() >= until]:
            del self.paused[name]
            self.processes[name].send_signal(signal.SIGCONT)

    def wait(self, seconds: float) -> None:
        """Supervise for `seconds`: restart dead processes, resume paused ones and end the faults that are due."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.finished():
            self.restart_the_dead()
            self.resume_the_paused()
            self._mend(time.monotonic())
            time.sleep(0.02)

    def wait_for_steps(self, steps: int) -> None:
        """Wait until the learner has trained `steps` more. Steps that a rollback undoes later count too."""
        self.wait_for("trained", steps)

    def wait_for(self, what: str, count: int) -> None:
        """Wait until the learner has noted `what` another `count` times, or the run is over.

        Raises:
            TimeoutError: this did not happen within `drain_s`: the run is stuck.
        """
        goal = self.seen(what) + count
        self.wait_until(lambda: self.seen(what) >= goal or self.finished(), f"not {count} times {what!r}")

    def wait_for_worker(self, name: str) -> None:
        """Wait until a group of this worker was accepted: the server does not know a process that has just started."""
        taken = f"no group of {name} was accepted"
        self.wait_until(lambda: any(row["what"] == "ok" for row in self.noted_by(name)), taken)

    def wait_for_order(self, worker: str) -> None:
        """Wait until the worker holds an assignment without a sent group: if stopped now, it leaves work undone."""
        self.wait_until(lambda: self.holds_order(worker), f"{worker} held no order")

    def holds_order(self, worker: str) -> bool:
        rows = self.noted_by(worker)
        sent = {(row["group"], row["attempt"]) for row in rows if row["what"] == "invoke"}
        return any((row["group"], row["attempt"]) not in sent for row in rows if row["what"] == "taken")

    def noted_by(self, worker: str) -> list[dict[str, Any]]:
        """Return the history of the worker's newest process."""
        pid = self.processes[worker].pid
        return lines(self.settings.root / "history" / f"{worker}-{pid}.jsonl")

    def wait_until(self, happened: Callable[[], bool], otherwise: str) -> None:
        """Supervise until `happened()` is true.

        Args:
            otherwise: beginning of the error's message.

        Raises:
            TimeoutError: it has not happened within `drain_s`.
            LearnerRefused: it cannot happen any more, because the learner has ended.
        """
        until = time.monotonic() + self.drain_s
        while not happened():
            # Ask again: the refusal itself may be the awaited event, and may have come since the first call.
            if self.seen("error") and not happened():
                raise LearnerRefused(f"{otherwise}: the learner was refused\n{self.tail()}")
            if time.monotonic() > until:
                raise TimeoutError(f"{otherwise} within {self.drain_s:.0f} s\n{self.tail()}")
            self.wait(0.02)

    def said(self, name: str) -> str:
        """Return the log of a process so far, including its earlier lives."""
        path = self.settings.root / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def finish(self) -> Verdict:
        """Let the run end without faults and judge it.

        Raises:
            TimeoutError: the run does not end.
        """
        (self.settings.root / "stop").touch()
        self.wait_until(self.finished, "the run did not end")
        for name in ("w0", "server"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[name].wait(10)
        self.close()
        verdict = check(self.settings)
        verdict.wrong += self.complaints
        return verdict

    def tail(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-600:]}" for path in self.settings.root.glob("*.log")
        )

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        if self.network is not None:
            self.network.close()
            self.network = None


@contextlib.contextmanager
def running(settings: ChaosSettings, seed: int, drain_s: float = DRAIN_S) -> Iterator[Harness]:
    harness = Harness(settings, seed, drain_s)
    try:
        harness.restart_the_dead()
        yield harness
    finally:
        harness.close()
