"""Run hostile peers against a real server process that also has an honest worker and a learner.

    python -m tests.replay.hostile [ATTACK ...] [--seconds 5]     figures for each attack
    python -m tests.replay.hostile --attack NAME ADDRESS          one attacker, until it is killed
    python -m tests.replay.hostile --serve ADDRESS                the server, until it is killed

Servers and attackers have processes of their own, so that their memory can be measured separately, and an attacker
takes no more than its share of the machine from the honest peers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import psutil

from asyncrl.errors import NoProgress, ReplayError
from asyncrl.replay.client.client import LearnerClient, RolloutClient
from asyncrl.replay.serving import run_server
from asyncrl.types import NO_VERSION
from tests.replay.attacks import ATTACKS, DIGEST, RUN, attack
from tests.replay.helpers import group, replay_config, settings
from tests.replay.open_door import without_keys

SILENT_S = 20.0
"""Heartbeat timeout in seconds. Attackers and a busy machine can delay an honest peer for seconds."""


@dataclass(slots=True)
class Honest:
    """What the honest worker and the learner have done so far."""

    steps: list[float] = field(default_factory=list)
    """Time at which each step was trained, on the monotonic clock."""
    trained: list[int] = field(default_factory=list)
    """Ids of the trained groups."""
    inserted: set[int] = field(default_factory=set)
    """Ids of the groups acknowledged as accepted."""


class Camp:
    """A server process, with an honest worker and a learner in threads of this process."""

    def __init__(self, log: int = subprocess.DEVNULL) -> None:
        self.config = replay_config(heartbeat_timeout_s=SILENT_S, wait_timeout_s=60.0)
        command = [sys.executable, "-m", "tests.replay.hostile", "--serve", self.config.address]
        self.server = subprocess.Popen(command, stderr=log)
        self.honest = Honest()
        self._closing = contextlib.ExitStack()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._attackers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Camp:
        self._closing.enter_context(without_keys())
        self._learner = LearnerClient(self.config.address, rank=0, run_digest=DIGEST, config=self.config)
        self._learner.restore(step=None, policy_version=NO_VERSION, snapshot=None)
        self._learner.publish(policy_version=0, parent=NO_VERSION)
        self._worker = RolloutClient(self.config.address, worker="honest", run_digest=DIGEST, config=self.config)
        self._threads = [
            threading.Thread(target=lambda: asyncio.run(self._work()), daemon=True),
            threading.Thread(target=self._train, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.relieve()
        if self.server.poll() is None:
            for thread in self._threads:
                thread.join(60)
        # Open clients would try to reach the server for ever. Closing them fails the calls that still wait for it.
        asyncio.run(self._worker.close())
        self._learner.close()
        for thread in self._threads:
            thread.join(60)
        self.server.kill()
        self.server.wait()
        self._closing.close()

    def besiege(self, name: str) -> None:
        """Start an attacker, and return once it attacks."""
        command = [sys.executable, "-m", "tests.replay.hostile", "--attack", name, self.config.address]
        attacker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._attackers.append(attacker)
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "attacking\n"

    def relieve(self) -> None:
        for attacker in self._attackers:
            attacker.kill()
            attacker.wait()
        self._attackers.clear()

    def rss_mb(self) -> float:
        return psutil.Process(self.server.pid).memory_info().rss / 1e6

    def open_files(self) -> int:
        return psutil.Process(self.server.pid).num_fds()

    def wait_for_steps(self, more: int, timeout_s: float) -> float:
        """Return the seconds until `more` steps were trained.

        Waits for the honest peers; unblocked by them or by the deadline.
        """
        began, goal = time.monotonic(), len(self.honest.steps) + more
        while len(self.honest.steps) < goal:
            waited = time.monotonic() - began
            assert waited < timeout_s, f"{goal - len(self.honest.steps)} of {more} steps not trained in {waited:.0f} s"
            assert self.server.poll() is None, f"the server ended with {self.server.returncode}"
            assert all(thread.is_alive() for thread in self._threads), "an honest peer failed"
            time.sleep(0.01)
        return time.monotonic() - began

    def check(self) -> None:
        """Check that every group acknowledged by now is trained, and none twice.

        A group that an attacker held before may be accepted only now, so this waits for some more steps; a few steps
        train everything that is stored.
        """
        acknowledged = set(self.honest.inserted)
        self.wait_for_steps(5, 120)
        trained = list(self.honest.trained)
        assert len(trained) == len(set(trained)), "a group was trained twice"
        assert acknowledged <= set(trained), f"acknowledged and never trained: {sorted(acknowledged - set(trained))}"

    async def _work(self) -> None:
        client = self._worker
        client.rendezvous().served(0, "f")
        with contextlib.suppress(ReplayError, NoProgress):  # the server is gone at the end
            while not self._stop.is_set():
                acquired = await client.acquire(slots=4, wait_s=0.2)
                for order in acquired.assignments:
                    reply = await client.insert(group(order, [0] * 50))
                    assert reply.status in ("accepted", "duplicate", "fenced", "closed"), reply
                    if reply.status in ("accepted", "duplicate"):  # Otherwise another worker has its assignment by now.
                        self.honest.inserted.add(order.group_id)

    def _train(self) -> None:
        with contextlib.suppress(ReplayError, NoProgress):
            for step in itertools.count():
                if self._stop.is_set():
                    return
                lease = self._learner.lease(step=step, rank=0, world=1, wait_s=60)
                self.honest.trained += [member.group_id for member in lease.plan.groups]
                self._learner.trained(step=step, policy_version=step + 1)
                self._learner.commit(step=step)
                self.honest.steps.append(time.monotonic())


def serve(address: str) -> None:
    """Run a server whose worker may stay at version 0 for ever."""
    logging.basicConfig(level=logging.WARNING)
    config = replay_config(address=address, heartbeat_timeout_s=SILENT_S)
    admission = settings(groups_per_step=2, max_staleness=1 << 30, pipeline_depth=1)
    with without_keys():
        run_server(config, admission, RUN, DIGEST, 7)


def measure(name: str, seconds: float) -> dict[str, float | str]:
    """Measure the honest learner's steps per second before and during an attack, and the server's memory."""
    with Camp() as camp:
        camp.wait_for_steps(50, 120)
        quiet = camp.wait_for_steps(200, 120)
        camp.besiege(name)
        began, before, steps = time.monotonic(), camp.rss_mb(), len(camp.honest.steps)
        memory = []
        while time.monotonic() - began < seconds:
            time.sleep(0.1)
            memory.append(camp.rss_mb())
        during = (len(camp.honest.steps) - steps) / (time.monotonic() - began)
        gaps = [b - a for a, b in itertools.pairwise(camp.honest.steps[steps:])]
        camp.relieve()
        camp.wait_for_steps(50, 120)
        camp.check()
        return {
            "attack": name,
            "steps_per_s_quiet": 200 / quiet,
            "steps_per_s_during": during,
            "median_step_ms": 1e3 * statistics.median(gaps) if gaps else -1.0,
            "rss_mb_before": before,
            "rss_mb_most": max(memory),
            "rss_mb_after": camp.rss_mb(),
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--serve")
    parser.add_argument("--attack", nargs=2)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
    elif given.attack:
        attack(*given.attack)
    else:
        for chosen in given.names or ATTACKS:
            found = measure(chosen, given.seconds)
            rounded = {key: round(value, 1) if isinstance(value, float) else value for key, value in found.items()}
            print(json.dumps(rounded), flush=True)
