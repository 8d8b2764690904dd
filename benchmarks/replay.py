"""How fast do groups go from a rollout worker to the learner, and what does it cost the replay server?

    python benchmarks/replay.py [--seconds 4] [--repeats 3] [--tokens 1024 8192 32768] [--only memory journal]
    python benchmarks/replay.py --workers 1000 --groups 1000000

First form: one producer, one consumer, something in between; interleaved repeats, medians. One JSON line. A producer
encodes or pickles each group anew. Except with Ray it has many under way, and more are on their way to the consumer.

    two_hop   the same frames through a bare ZeroMQ PUSH/PULL proxy in C: nothing is kept, acknowledged, or looked at by
              the consumer; only the producer checks, as it encodes
    decoded   the same, and the consumer makes arrays of the groups, as the learner's does
    pickle    pickled groups through the same proxy, unpickled by the consumer
    ray       groups through ray.util.queue, one after the other; from 100 KB the consumer reads them in shared memory
    memory    the replay server: acquire, insert, lease, train, commit; the producer and the server check every value
    journal   the same with `replay.durability=journal`; `ack_*_ms` is from insert to durable acknowledgement

`cpu_us_per_group` is what all processes together spent, which says more than the rates where others use the machine.
    shards    the same with `replay.shards=2`, all on this machine; `server_*` is the planner alone

Second form: that many connected workers, tiny groups, memory only: groups/s, CPU of the server per group, its memory
after the first batch and after each quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import pickle
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import ray
import zmq
from ray.util.queue import Queue

from asyncrl.learner.prefetch import LeasePrefetch
from asyncrl.replay import wire
from asyncrl.replay.admission import AdmissionSettings
from asyncrl.replay.client import LearnerClient, RolloutClient
from asyncrl.replay.payload import decode_trajectory, encode_group, split_frames
from asyncrl.replay.serving import run_server
from asyncrl.replay.shard import run_shard
from asyncrl.replay.wire import Envelope
from asyncrl.schema import ReplayConfig
from asyncrl.types import NO_VERSION, Assignment, Trajectory, TrajectoryGroup

GROUP_SIZE = 8
STEP_BYTES = 32 << 20
"""Of a batch; small groups go 64 to a batch."""
WARM_STEPS = 3
PIPES = 150
"""Groups that can be under way in the pipes of a proxy, counted by messages: measured from when they have all left."""
IN_FLIGHT = 24
"""Groups that the producer has under way at once."""
spawn = multiprocessing.get_context("spawn")
Row = dict[str, float]


def make_trajectory(tokens: int) -> Trajectory:
    mask = np.arange(tokens) >= max(1, tokens // 4)
    return Trajectory(
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        policy_versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
        reward=1.0,
    )


def make_group(trajectories: tuple[Trajectory, ...], order: Assignment | None = None) -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=order.group_id if order else 0,
        prompt_index=order.prompt_index if order else 0,
        attempt=order.attempt if order else 0,
        worker="producer",
        trajectories=trajectories,
    )


def make_trajectories(tokens: int) -> tuple[Trajectory, ...]:
    """Eight of their own: pickle would carry one that is there eight times only once."""
    return tuple(make_trajectory(tokens) for _ in range(GROUP_SIZE))


def rates(groups: int, elapsed: float, tokens: int) -> Row:
    """9 bytes per token: what the arrays hold that any of the contenders has to carry."""
    return {
        "trajectories_per_s": groups * GROUP_SIZE / elapsed,
        "mb_per_s": groups * GROUP_SIZE * tokens * 9 / elapsed / 1e6,
    }


# ---- contenders without a replay


def run_proxy(front: str, back: str) -> None:
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for end, address in ((pull, front), (push, back)):
        end.set_hwm(64)
        end.bind(address)
    zmq.proxy(pull, push)


def run_pusher(front: str, tokens: int, pickled: bool) -> None:
    push = zmq.Context().socket(zmq.PUSH)
    push.set_hwm(64)
    push.connect(front)
    group = make_group(make_trajectories(tokens))
    while True:
        if pickled:
            push.send(pickle.dumps(group, 5), copy=False)
        else:
            encoded = encode_group(group)
            head = wire.pack([wire.encode_group_header(encoded.header), encoded.layout])
            push.send_multipart([head, *encoded.frames], copy=False)


def unpickle(frames: list[zmq.Frame]) -> None:
    pickle.loads(frames[0].buffer)


def decode(frames: list[zmq.Frame]) -> None:
    row, layout = wire.unpack(frames[0].buffer)
    header = wire.decode_group_header(row)
    stored = split_frames(header, layout, [frame.buffer for frame in frames[1:]])
    for parts in zip(header.trajectories, stored.blobs, stored.large, strict=True):
        decode_trajectory(*parts)


def measure_proxy(tokens: int, seconds: float, use: Callable[[list[zmq.Frame]], None] | None) -> Row:
    front, back = free_address(), free_address()
    children = [
        spawn.Process(target=run_proxy, args=(front, back), daemon=True),
        spawn.Process(target=run_pusher, args=(front, tokens, use is unpickle), daemon=True),
    ]
    with started(children):
        context = zmq.Context()
        pull = context.socket(zmq.PULL)
        pull.set_hwm(64)
        pull.connect(back)

        def take() -> None:
            frames = pull.recv_multipart(copy=False)
            if use is not None:
                use(frames)

        row, groups, cpu = timed(take, seconds, tokens, warm=PIPES)
        context.destroy(linger=0)
    return row | {"cpu_us_per_group": cpu / groups * 1e6}


def timed(take: Callable[[], None], seconds: float, tokens: int, warm: int) -> tuple[Row, int, float]:
    """`(rates, groups, CPU seconds of this process and its children)`."""
    for _ in range(warm):
        take()
    start, groups, cpu = time.perf_counter(), 0, family_cpu_seconds()
    while time.perf_counter() - start < seconds:
        take()
        groups += 1
    return rates(groups, time.perf_counter() - start, tokens), groups, family_cpu_seconds() - cpu


@ray.remote
def ray_producer(queue: Queue, tokens: int) -> None:
    group = make_group(make_trajectories(tokens))
    while True:
        queue.put(group)


def measure_ray(tokens: int, seconds: float, folder: Path) -> Row:
    queue = Queue(maxsize=64)
    task = ray_producer.remote(queue, tokens)
    try:
        return timed(queue.get, seconds, tokens, warm=10)[0]
    finally:
        ray.cancel(task, force=True)
        queue.shutdown(force=True)


# ---- the replay server


async def produce(config: ReplayConfig, tokens: int, acks: Path) -> None:
    client = RolloutClient(config.address, worker="producer", run_digest="d", config=config)
    board = await client.watch(revision=0, wait_s=30)
    await client.served(int(board.values["version"]), "f")
    waits: list[float] = []
    trajectories = make_trajectories(tokens)

    async def insert(group: TrajectoryGroup) -> None:
        sent = time.perf_counter()
        await client.insert(group)
        waits.append((time.perf_counter() - sent) * 1e3)

    running: set[asyncio.Task] = set()
    while True:
        acquired = await client.acquire(slots=IN_FLIGHT, wait_s=1.0)
        if acquired.stop:
            break
        for order in acquired.assignments:
            while len(running) >= IN_FLIGHT:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            group = make_group(trajectories, order)
            task = asyncio.create_task(insert(group))
            running.add(task)
            task.add_done_callback(running.discard)
    await client.close()
    acks.write_text(json.dumps(waits))


def run_producer(config: ReplayConfig, tokens: int, acks: Path) -> None:
    asyncio.run(produce(config, tokens, acks))


def admission(groups_per_step: int, max_in_flight: int = 512) -> AdmissionSettings:
    return AdmissionSettings(
        groups_per_step=groups_per_step,
        group_size=GROUP_SIZE,
        max_staleness=1 << 20,
        pipeline_depth=4,
        max_in_flight=max_in_flight,
    )


def serve(config: ReplayConfig, settings: AdmissionSettings, folder: Path | None) -> None:
    run_server(config, settings, "bench", "d", 0, folder=folder)


def serve_shard(config: ReplayConfig, number: int, folder: Path) -> None:
    run_shard(replace(config, shard_address=free_address()), number, "d", folder=folder)


def measure_replay(tokens: int, seconds: float, folder: Path, *, journal: bool, shards: int = 0) -> Row:
    config = ReplayConfig(address=free_address(), max_staleness=1 << 20, pipeline_depth=4, shards=shards)
    groups_per_step = int(min(64, max(4, STEP_BYTES // (GROUP_SIZE * tokens * 9))))
    place = folder / f"journal-{time.monotonic_ns()}" if journal else None
    server = spawn.Process(target=serve, args=(config, admission(groups_per_step), place), daemon=True)
    producer = spawn.Process(target=run_producer, args=(config, tokens, folder / "acks.json"), daemon=True)
    stores = [
        spawn.Process(target=serve_shard, args=(config, number, folder / f"{server.name}-{number}"), daemon=True)
        for number in range(shards)
    ]
    with started([server, *stores]):
        learner = begin(config)
        with started([producer]):
            row = consume(learner, server, tokens, seconds, groups_per_step)
            learner.finish()
            producer.join(20)
        learner.close()
        server.join(20)
    waits = sorted(json.loads((folder / "acks.json").read_text()))
    row["ack_p50_ms"], row["ack_p99_ms"] = (waits[int(len(waits) * part)] for part in (0.5, 0.99))
    return row


def begin(config: ReplayConfig) -> LearnerClient:
    learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
    restored = learner.restore(step=None, policy_version=NO_VERSION, snapshot=None)
    learner.publish(policy_version=restored.next_version, parent=NO_VERSION)
    learner.announce({"version": restored.next_version})
    return learner


def consume(learner: LearnerClient, server: BaseProcess, tokens: int, seconds: float, groups_per_step: int) -> Row:
    """Two leases are under way, one more than a real learner has: that one trains while a batch comes and is decoded,
    this one trains in no time and would wait for the one while it decodes the other."""
    leases = tuple(LeasePrefetch(learner, rank=0, world=1, wait_s=30.0) for _ in range(2))
    for ahead in (0, 1):
        leases[ahead].ask(ahead)
    step, start, cpu, all_cpu = 0, 0.0, 0.0, 0.0
    while step <= WARM_STEPS or time.perf_counter() - start < seconds:
        if step == WARM_STEPS:
            start, cpu, all_cpu = time.perf_counter(), cpu_seconds(server.pid), family_cpu_seconds()
        leases[step % 2].take(step)
        learner.trained(step=step, policy_version=step + 1)
        leases[step % 2].ask(step + 2)
        learner.commit(step=step)
        step += 1
    elapsed, used = time.perf_counter() - start, cpu_seconds(server.pid) - cpu
    all_used = family_cpu_seconds() - all_cpu
    for ahead in (step, step + 1):
        leases[ahead % 2].take(ahead)
    groups = (step - WARM_STEPS) * groups_per_step
    cost = {"cpu_us_per_group": all_used / groups * 1e6, "server_cpu_us_per_group": used / groups * 1e6}
    return rates(groups, elapsed, tokens) | cost | {"server_rss_mb": rss_mb(server)}


# ---- many workers


def run_crowd(address: str, workers: int, run_id: str) -> None:
    """`workers` connected sockets in one process; each asks for orders and inserts what it is told to make."""
    Crowd(address, workers, run_id).run()


class Crowd:
    def __init__(self, address: str, workers: int, run_id: str) -> None:
        self.context, self.poller, self.run_id = zmq.Context(), zmq.Poller(), run_id
        self.context.set(zmq.MAX_SOCKETS, workers + 64)
        self.names: dict[zmq.Socket, str] = {}
        self.requests: dict[zmq.Socket, int] = {}
        self.under_way: dict[zmq.Socket, int] = {}
        self.stopped: set[zmq.Socket] = set()
        for number in range(workers):
            peer = self.context.socket(zmq.DEALER)
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(address)
            self.names[peer], self.requests[peer], self.under_way[peer] = f"w{number}", 0, 0
            self.poller.register(peer, zmq.POLLIN)
        template = encode_group(make_group(make_trajectories(16)))
        self.layout, self.frames, self.header = template.layout, template.frames, template.header

    def run(self) -> None:
        for peer, name in self.names.items():
            self._send(peer, "hello", ["worker", name, "d", 0, ""], plain=True)
        beat = time.monotonic()
        while len(self.stopped) < len(self.names):
            for peer, _ in self.poller.poll(1000):
                while peer.poll(0):
                    self._take(peer, wire.decode_envelope(peer.recv_multipart()[0]))
            if time.monotonic() - beat > 3.0:
                beat = time.monotonic()
                for peer in self.names.keys() - self.stopped:
                    self._send(peer, "heartbeat", [{}, []])
        for peer in self.names:
            self._send(peer, "goodbye", None)
        time.sleep(1.0)
        self.context.destroy(linger=500)

    def _send(self, peer: zmq.Socket, verb: str, body: object, frames: list | None = None, plain: bool = False) -> None:
        self.requests[peer] = number = self.requests[peer] + 1
        name, run = self.names[peer], "" if verb == "hello" else self.run_id
        # All answers to earlier requests have come: this peer has one outstanding.
        asked = body if plain else [number, body]
        envelope = Envelope(run=run, verb=verb, request=number, incarnation=name, body=asked)
        peer.send_multipart([wire.encode_envelope(envelope), *(frames or [])])

    def _take(self, peer: zmq.Socket, reply: Envelope) -> None:
        if reply.verb != "ok":
            raise AssertionError(f"{reply.verb}: {reply.body}")
        body = reply.body
        if body is None or (isinstance(body, list) and len(body) == 3 and body[0] == self.run_id):
            self._send(peer, *(("served", [0, "f"]) if body else ("acquire", [4, 5.0])))
        elif len(body) == 4:
            self._orders(peer, body)
        elif body[0] in ("accepted", "fenced"):  # The end of the run fences what is still under way.
            self.under_way[peer] -= 1
            if self.under_way[peer] == 0:
                self._send(peer, "acquire", [4, 5.0])

    def _orders(self, peer: zmq.Socket, body: list) -> None:
        orders, _, stop, _ = body
        if stop:
            self.stopped.add(peer)
            return
        self.under_way[peer] = len(orders)
        for group_id, prompt_index, attempt, *_ in orders:
            row = wire.encode_group_header(self.header)
            row[0], row[1], row[2] = group_id, prompt_index, attempt
            self._send(peer, "insert", [row, self.layout], list(self.frames))
        if not orders:
            self._send(peer, "acquire", [4, 5.0])


def measure_crowd(workers: int, groups: int) -> dict[str, float | list[float]]:
    config = ReplayConfig(address=free_address(), max_staleness=1 << 20, heartbeat_timeout_s=120.0)
    groups_per_step = 1024
    server = spawn.Process(target=serve, args=(config, admission(groups_per_step, 8192), None), daemon=True)
    with started([server]):
        learner = begin(config)
        crowd = spawn.Process(target=run_crowd, args=(config.address, workers, "bench"), daemon=True)
        with started([crowd]):
            leases = LeasePrefetch(learner, rank=0, world=1, wait_s=120.0)
            steps, memory = max(2, groups // groups_per_step), []
            for step in range(steps):
                leases.take(step)
                leases.ask(step + 1)
                learner.trained(step=step, policy_version=step + 1)
                learner.commit(step=step)
                if step == WARM_STEPS:
                    start, cpu = time.perf_counter(), cpu_seconds(server.pid)
                memory.append(rss_mb(server))
            elapsed, used = time.perf_counter() - start, cpu_seconds(server.pid) - cpu
            leases.take(steps)
            learner.finish()
            crowd.join(30)
        learner.close()
        server.join(30)
    counted = (steps - WARM_STEPS - 1) * groups_per_step
    return {
        "workers": workers,
        "groups": steps * groups_per_step,
        "groups_per_s": round(counted / elapsed, 1),
        "server_cpu_us_per_group": round(used / counted * 1e6, 1),
        "rss_mb_of_quarters": [round(memory[part * (steps - 1) // 4], 1) for part in range(5)],
    }


# ---- processes


@contextlib.contextmanager
def started(children: Sequence[BaseProcess]) -> Iterator[None]:
    for child in children:
        child.start()
    try:
        yield
    finally:
        for child in children:
            child.terminate()
            child.join(10)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def cpu_seconds(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100.0


def family_cpu_seconds() -> float:
    """Of this process and the children that it started."""
    return sum(cpu_seconds(pid) for pid in (os.getpid(), *(child.pid for child in multiprocessing.active_children())))


def rss_mb(process: BaseProcess) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


CONTENDERS: dict[str, Callable[[int, float, Path], Row]] = {
    "two_hop": lambda tokens, seconds, folder: measure_proxy(tokens, seconds, None),
    "decoded": lambda tokens, seconds, folder: measure_proxy(tokens, seconds, decode),
    "pickle": lambda tokens, seconds, folder: measure_proxy(tokens, seconds, unpickle),
    "ray": measure_ray,
    "memory": lambda tokens, seconds, folder: measure_replay(tokens, seconds, folder, journal=False),
    "journal": lambda tokens, seconds, folder: measure_replay(tokens, seconds, folder, journal=True),
    "shards": lambda tokens, seconds, folder: measure_replay(tokens, seconds, folder, journal=True, shards=2),
}


def compare(names: list[str], sizes: list[int], seconds: float, repeats: int) -> dict[str, dict[str, Row]]:
    """Median of each number over the repeats, contenders taking turns so that the machine's moods hit all alike."""
    rows: dict[tuple[int, str], list[Row]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as folder:
        for _ in range(repeats):
            for tokens in sizes:
                for name in names:
                    rows.setdefault((tokens, name), []).append(CONTENDERS[name](tokens, seconds, Path(folder)))
    return {
        str(tokens): {
            name: {
                key: round(statistics.median(row[key] for row in rows[tokens, name]), 2)
                for key in rows[tokens, name][0]
            }
            for name in names
        }
        for tokens in sizes
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--groups", type=int, default=1_000_000)
    options = parser.parse_args()
    if options.workers:
        row = measure_crowd(options.workers, options.groups)
        print(json.dumps({"benchmark": "replay_crowd", **row}))
        return
    if "ray" in options.only:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    found = compare(options.only, options.tokens, options.seconds, options.repeats)
    print(json.dumps({"benchmark": "replay", "group_size": GROUP_SIZE, **found}))


if __name__ == "__main__":
    main()
