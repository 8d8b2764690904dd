"""Real processes, killed, paused, cut off and robbed of power and disk; started again as a supervisor would.

What a fault breaks for a while is mended by `wait`, which every other wait goes through.
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

from asyncrl.family import bound

from .check import Verdict, check, lines
from .flip import find_flip
from .network import TO_PEER, TO_SERVER, Network
from .power import lose_power
from .settings import ChaosSettings

DRAIN_S = 120.0


class LearnerRefused(Exception):
    """Its errors end it at once: the verdict is that of the run so far."""


class Harness:
    """One run. Every process it started is dead when it is closed."""

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
        self.shards = [f"shard-{number}" for number in range(len(settings.shards))]
        self.names = ["server", *self.shards, *(f"w{n}" for n in range(settings.workers)), "learner"]

    def start(self, name: str) -> None:
        module = "worker" if name.startswith("w") else name.partition("-")[0]
        with (self.settings.root / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                bound([sys.executable, "-m", f"tests.chaos.{module}", self.settings.folder, name]),
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

    def kill_shard(self, number: int, *, power: bool) -> None:
        self.kill(self.shards[number])
        if power:
            self.lost_bytes += lose_power(self.settings.shard_journal(number), self.random)

    def restart_the_dead(self) -> None:
        """What died is started again; a worker or learner that ended by itself, too, unless the run is over."""
        for name in self.names:
            dead = name in self.processes and self.processes[name].poll() is not None
            if name not in self.processes or (dead and not self.finished()):
                self.start(name)

    def finished(self) -> bool:
        process = self.processes.get("learner")
        return process is not None and process.poll() == 0

    def seen(self, what: str) -> int:
        """How often the learner noted `what` so far."""
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
        elif kind in ("shard", "shard_power"):
            self.kill_shard(self.random.randrange(len(self.shards)), power=kind == "shard_power")
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
        """The network: `cut`, `delay` or `blackhole`."""
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
        """Flip a durable bit while the server is down. It must refuse to start and name file and byte; mended, the run
        goes on."""
        for _ in range(10):
            self.kill("server")
            flip = find_flip(self.settings.journal, self.random)
            if flip is not None:
                break
            self.wait_for_steps(1)  # A server that has just begun has nothing durable in its new segment yet.
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
        """Supervise for a while: start the dead again, wake the paused and mend what is due."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.finished():
            self.restart_the_dead()
            self.resume_the_paused()
            self._mend(time.monotonic())
            time.sleep(0.02)

    def wait_for_steps(self, steps: int) -> None:
        """Until the learner has trained `steps` more; those that a rollback undoes later count."""
        self.wait_for("trained", steps)

    def wait_for(self, what: str, count: int) -> None:
        """Until the learner has noted `what` so many times more, or the run is over.

        Raises:
            TimeoutError: it has not within `drain_s`: the run is wedged.
        """
        goal = self.seen(what) + count
        self.wait_until(lambda: self.seen(what) >= goal or self.finished(), f"not {count} times {what!r}")

    def wait_for_worker(self, name: str) -> None:
        """Until a group of this worker was taken in: a process that has just begun is not known to anybody."""
        taken = f"no group of {name} was accepted"
        self.wait_until(lambda: any(row["what"] == "ok" for row in self.noted_by(name)), taken)

    def wait_for_order(self, worker: str) -> None:
        """Until it holds an order that it has sent nothing for: stopped now, it leaves work undone."""
        self.wait_until(lambda: self.holds_order(worker), f"{worker} held no order")

    def holds_order(self, worker: str) -> bool:
        rows = self.noted_by(worker)
        sent = {(row["group"], row["attempt"]) for row in rows if row["what"] == "invoke"}
        return any((row["group"], row["attempt"]) not in sent for row in rows if row["what"] == "taken")

    def noted_by(self, worker: str) -> list[dict[str, Any]]:
        """History of the worker's newest life."""
        pid = self.processes[worker].pid
        return lines(self.settings.root / "history" / f"{worker}-{pid}.jsonl")

    def wait_until(self, happened: Callable[[], bool], otherwise: str) -> None:
        """Supervise until then.

        Raises:
            TimeoutError: `otherwise`; it has not happened within `drain_s`.
            LearnerRefused: nor will it.
        """
        until = time.monotonic() + self.drain_s
        while not happened():
            # The refusal itself may be what is waited for, and have come since.
            if self.seen("error") and not happened():
                raise LearnerRefused(f"{otherwise}: the learner was refused\n{self.tail()}")
            if time.monotonic() > until:
                raise TimeoutError(f"{otherwise} within {self.drain_s:.0f} s\n{self.tail()}")
            self.wait(0.02)

    def said(self, name: str) -> str:
        """What a process has logged so far, its earlier lives included."""
        path = self.settings.root / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def finish(self) -> Verdict:
        """Let the run end in peace and judge it.

        Raises:
            TimeoutError: it does not end.
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
