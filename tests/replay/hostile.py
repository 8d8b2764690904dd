"""Peers that mean harm, against a real server process, beside an honest worker and a learner.

    python -m tests.replay.hostile [ATTACK ...] [--seconds 5]     figures for each attack
    python -m tests.replay.hostile --attack NAME ADDRESS          one attacker, until it is killed
    python -m tests.replay.hostile --serve ADDRESS                the server, until it is killed

Servers and attackers have processes of their own, so that their memory can be told apart, and that an attacker takes
nothing but its share of the machine from the honest.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psutil
import zmq

from asyncrl.errors import NoProgress, ReplayError
from asyncrl.replay import wire
from asyncrl.replay.client import LearnerClient, RolloutClient
from asyncrl.replay.serving import run_server
from asyncrl.replay.wire import Envelope
from asyncrl.types import NO_VERSION
from tests.addresses import free_address

from .helpers import group, replay_config, settings

RUN, DIGEST = "run", "d"
GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 0]) + b"NULL".ljust(20, b"\0") + bytes(32)
"""ZMTP 3.0, mechanism NULL."""
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
MORE, LONG, COMMAND = 1, 2, 4


# ---- attackers


def endpoint(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("tcp://").split(":")
    return host, int(port)


def connected(address: str, within_s: float = 30.0) -> socket.socket:
    """waits for: a server that is just starting; unblocked by: its listening, or the deadline."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return socket.create_connection(endpoint(address))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def raw(address: str) -> socket.socket:
    """A connection whose handshake is done, written by hand: what no library would send can follow."""
    made = connected(address)
    made.sendall(GREETING)
    made.sendall(bytes([COMMAND, len(READY)]) + READY)
    return made


def frame(flags: int, body: bytes, announced: int | None = None) -> bytes:
    return struct.pack(">BQ", flags | LONG, len(body) if announced is None else announced) + body


def envelope(verb: str, request: int, incarnation: str, body: object, run: str = RUN) -> bytes:
    return wire.encode_envelope(Envelope(run=run, verb=verb, request=request, incarnation=incarnation, body=body))


def hello(name: str, request: int = 1) -> bytes:
    return envelope("hello", request, f"life of {name}", ["worker", name, DIGEST, NO_VERSION, ""])


def dealer(address: str) -> zmq.Socket:
    made = zmq.Context.instance().socket(zmq.DEALER)
    made.connect(address)
    return made


def drain(peer: zmq.Socket) -> None:
    with contextlib.suppress(zmq.Again):
        while True:
            peer.recv_multipart(zmq.DONTWAIT)


def flood_garbage(address: str) -> Iterator[None]:
    """What is no message at all."""
    peer = dealer(address)
    while True:
        for _ in range(100):
            peer.send(b"\xc1garbage")
        drain(peer)
        yield


def flood_pings(address: str) -> Iterator[None]:
    """Garbage with beats of the protocol in between, from one who leaves and comes back all the time."""
    beat = bytes([COMMAND, 7]) + b"\x04PING" + struct.pack(">H", 50)
    burst = (frame(0, b"\xc1garbage") * 20 + beat) * 200
    while True:
        with contextlib.suppress(OSError):
            peer = raw(address)
            for _ in range(100):
                peer.sendall(burst)
            # A reset, with most of it unread.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
        yield


def flood_large(address: str) -> Iterator[None]:
    """Headers of the largest size, expensive to take apart and wrong in the end."""
    peer = dealer(address)
    deep = wire.pack([[0] * 65_000] * 64)
    while True:
        peer.send(deep)
        drain(peer)
        yield


def flood_strangers(address: str) -> Iterator[None]:
    """Requests without a hello, of another run and of another schema."""
    peer = dealer(address)
    other_schema = wire.pack([wire.SCHEMA + 1, RUN, "members", 3, "x", None])
    while True:
        for _ in range(30):
            peer.send(envelope("members", 1, "nobody", [0, None]))
            peer.send(envelope("members", 2, "nobody", [0, None], run="another"))
            peer.send(other_schema)
        drain(peer)
        yield


def flood_hellos(address: str) -> Iterator[None]:
    """One connection that is a new worker each time."""
    peer = dealer(address)
    for number in itertools.count():
        peer.send(hello(f"sybil {number}"))
        if number % 20 == 0:
            drain(peer)
            yield


def flood_waits(address: str) -> Iterator[None]:
    """One worker that asks for orders without end, and would wait an hour for each."""
    peer = dealer(address)
    peer.send(hello("patient"))
    for number in itertools.count(2):
        peer.send(envelope("watch", number, "life of patient", [0, [0, 3600.0]]))
        if number % 100 == 0:
            drain(peer)
            yield


def flood_unacknowledged(address: str) -> Iterator[None]:
    """One worker that never says which answers have reached it."""
    peer = dealer(address)
    peer.send(hello("forgetful"))
    for number in itertools.count(2):
        peer.send(envelope("acquire", number, "life of forgetful", [0, [0, 0.0]]))
        if number % 100 == 0:
            drain(peer)
            yield


def deaf(address: str) -> Iterator[None]:
    """One worker that asks and never reads an answer."""
    while True:
        with contextlib.suppress(OSError):  # the server has closed the line
            peer = raw(address)
            peer.sendall(frame(0, hello("deaf")))
            for number in itertools.count(2):
                peer.sendall(frame(0, envelope("watch", number, "life of deaf", [0, [number, 0.0]])))
                if number % 100 == 0:
                    yield


def half_open(address: str) -> Iterator[None]:
    """Connections that never finish their greeting."""
    kept: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            kept.append(socket.create_connection(endpoint(address)))
            kept[-1].sendall(GREETING[:20])
        if len(kept) >= 2000:
            for old in kept[:1000]:
                old.close()
            del kept[:1000]
        yield


def come_and_go(address: str) -> Iterator[None]:
    """Connections that are dropped at once."""
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(endpoint(address)).close()
        yield


def oversized(address: str) -> Iterator[None]:
    """Frames that announce more than is allowed, or more than ever comes."""
    kept: list[socket.socket] = []
    for size in itertools.cycle((1 << 62, wire.MAX_MESSAGE_BYTES + 1, wire.MAX_MESSAGE_BYTES)):
        with contextlib.suppress(OSError):
            kept.append(raw(address))
            kept[-1].sendall(frame(0, b"x" * 1000, announced=size))
        for old in kept[:-20]:
            old.close()
        del kept[:-20]
        time.sleep(0.01)
        yield


def endless(address: str) -> Iterator[None]:
    """One message whose frames never end."""
    piece = frame(MORE, bytes(64 << 10))
    while True:
        with contextlib.suppress(OSError):
            peer = raw(address)
            while True:
                peer.sendall(piece)
                yield


ATTACKS: dict[str, Callable[[str], Iterator[None]]] = {
    attack.__name__: attack
    for attack in (
        flood_garbage,
        flood_pings,
        flood_large,
        flood_strangers,
        flood_hellos,
        flood_waits,
        flood_unacknowledged,
        deaf,
        half_open,
        come_and_go,
        oversized,
        endless,
    )
}


def attack(name: str, address: str) -> None:
    for turns, _ in enumerate(ATTACKS[name](address)):
        if turns == 0:
            print("attacking", flush=True)


# ---- the honest


@dataclass(slots=True)
class Honest:
    """What came of an honest worker and a learner."""

    steps: list[float] = field(default_factory=list)
    """When each was trained, on the monotonic clock."""
    trained: list[int] = field(default_factory=list)
    """Group ids."""
    inserted: set[int] = field(default_factory=set)
    """Acknowledged as accepted."""


class Camp:
    """A server process with an honest worker and a learner of this process."""

    def __init__(self, keys: str = "", log: int = subprocess.DEVNULL) -> None:
        self.config = replay_config(address=free_address(), keys=keys, heartbeat_timeout_s=5.0, wait_timeout_s=60.0)
        command = [sys.executable, "-m", "tests.replay.hostile", "--serve", self.config.address, "--keys", keys]
        self.server = subprocess.Popen(command, stderr=log)
        self.honest = Honest()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._attackers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Camp:
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
        # Open, they would look for the server for ever; and whoever of them still waits for it fails now.
        asyncio.run(self._worker.close())
        self._learner.close()
        for thread in self._threads:
            thread.join(60)
        self.server.kill()
        self.server.wait()

    def besiege(self, name: str) -> None:
        """Start an attacker; returns once it attacks."""
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
        """Seconds until `more` steps were trained. waits for: the honest; unblocked by: them, or the deadline."""
        began, goal = time.monotonic(), len(self.honest.steps) + more
        while len(self.honest.steps) < goal:
            waited = time.monotonic() - began
            assert waited < timeout_s, f"{goal - len(self.honest.steps)} of {more} steps not trained in {waited:.0f} s"
            assert self.server.poll() is None, f"the server ended with {self.server.returncode}"
            assert all(thread.is_alive() for thread in self._threads), "an honest peer failed"
            time.sleep(0.01)
        return time.monotonic() - began

    def check(self) -> None:
        """Every acknowledged group was trained once, but for those that were still on their way."""
        trained = list(self.honest.trained)
        assert len(trained) == len(set(trained)), "a group was trained twice"
        lost = sorted(group_id for group_id in set(self.honest.inserted) if group_id < max(trained) - 16)
        assert set(lost) <= set(trained), f"acknowledged and never trained: {sorted(set(lost) - set(trained))}"

    async def _work(self) -> None:
        client = self._worker
        await client.served(0, "f")
        with contextlib.suppress(ReplayError, NoProgress):  # the server is gone at the end
            while not self._stop.is_set():
                acquired = await client.acquire(slots=4, wait_s=0.2)
                for order in acquired.assignments:
                    reply = await client.insert(group(order, [0] * 50))
                    assert reply.status in ("accepted", "duplicate"), reply
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


def serve(address: str, keys: str) -> None:
    """A server whose worker may stay at version 0 for ever."""
    logging.basicConfig(level=logging.WARNING)
    config = replay_config(address=address, keys=keys, heartbeat_timeout_s=5.0)
    admission = settings(groups_per_step=2, max_staleness=1 << 30, pipeline_depth=1)
    run_server(config, admission, RUN, DIGEST, 7)


def measure(name: str, seconds: float) -> dict[str, float | str]:
    """Steps per second of the honest before and during an attack, and what it does to the server's memory."""
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
    parser.add_argument("--keys", default="")
    parser.add_argument("--attack", nargs=2)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.keys)
    elif given.attack:
        attack(*given.attack)
    else:
        for chosen in given.names or ATTACKS:
            found = measure(chosen, given.seconds)
            rounded = {key: round(value, 1) if isinstance(value, float) else value for key, value in found.items()}
            print(json.dumps(rounded), flush=True)
