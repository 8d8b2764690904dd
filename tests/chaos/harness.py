"""Real processes, killed, paused and robbed of their power; they are started again as a supervisor would."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from .check import Verdict, check, lines
from .power import lose_power
from .settings import ChaosSettings

DRAIN_S = 60.0


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


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
        self.names = ["server", *(f"w{n}" for n in range(settings.workers)), "learner"]

    def start(self, name: str) -> None:
        module = "worker" if name.startswith("w") else name
        with (self.settings.root / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", f"tests.chaos.{module}", self.settings.folder, name],
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
        elif kind == "pause":
            name = self.random.choice(self.names)
            self.pause(name, self.random.choice((0.3, 2.5)))

    def pause(self, name: str, seconds: float) -> None:
        self.processes[name].send_signal(signal.SIGSTOP)
        self.paused[name] = time.monotonic() + seconds

    def resume_the_paused(self) -> None:
        for name in [name for name, until in self.paused.items() if time.monotonic() >= until]:
            del self.paused[name]
            self.processes[name].send_signal(signal.SIGCONT)

    def wait(self, seconds: float) -> None:
        """Supervise for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.finished():
            self.restart_the_dead()
            self.resume_the_paused()
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
        files = (self.settings.root / "history").glob
        self.wait_until(lambda: any(row["what"] == "ok" for f in files(f"{name}-*.jsonl") for row in lines(f)), taken)

    def wait_until(self, happened: Callable[[], bool], otherwise: str) -> None:
        """Supervise until then.

        Raises:
            TimeoutError: `otherwise`; it has not happened within `drain_s`.
        """
        until = time.monotonic() + self.drain_s
        while not happened():
            if time.monotonic() > until:
                raise TimeoutError(f"{otherwise} within {self.drain_s:.0f} s\n{self.tail()}")
            self.wait(0.02)

    def said(self, name: str) -> str:
        """What a process has logged so far."""
        return (self.settings.root / f"{name}.log").read_text(errors="replace")

    def finish(self) -> Verdict:
        """Let the run end in peace and judge it.

        Raises:
            TimeoutError: it does not end.
        """
        (self.settings.root / "stop").touch()
        until = time.monotonic() + self.drain_s
        while not self.finished():
            if time.monotonic() > until:
                raise TimeoutError(f"the run did not end within {self.drain_s:.0f} s\n{self.tail()}")
            self.wait(0.05)
        for name in ("w0", "server"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[name].wait(10)
        self.close()
        return check(self.settings)

    def tail(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-600:]}" for path in self.settings.root.glob("*.log")
        )

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


@contextlib.contextmanager
def running(settings: ChaosSettings, seed: int, drain_s: float = DRAIN_S) -> Iterator[Harness]:
    harness = Harness(settings, seed, drain_s)
    try:
        harness.restart_the_dead()
        yield harness
    finally:
        harness.close()
