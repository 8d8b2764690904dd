"""How fast do groups go from a rollout worker to the learner, and what do they cost the replay server?

    python -m benchmarks.replay [--seconds 4] [--repeats 3] [--tokens 1024 8192 32768] [--extras-mb 8] [--only memory]

One producer, one consumer and something in between, each in its own process; repeats are interleaved, and the figures
are medians. Prints one JSON line. A producer encodes or pickles each group anew. Except with Ray it has many groups
under way, and more are on their way to the consumer.

    two_hop   the same frames through a bare ZeroMQ PUSH/PULL proxy in C: nothing is kept or acknowledged, and the
              consumer does not read the groups; only the producer checks them, as it encodes
    two_hop_b the same with the send buffers that the replay's sockets have on loopback; ZeroMQ's are the system's
    two_hop_ipc  as two_hop_b by unix sockets, like the replay's processes on one machine; two_hop goes by tcp
    forward   as two_hop, with a proxy in Python that hands on what it gets: the minimum for a server in Python
    decoded   as two_hop, and the consumer makes arrays of the groups, as the learner's does
    pickle    pickled groups through the same proxy, unpickled by the consumer
    ray       groups through ray.util.queue, one after the other (see `ray_queue.py`)
    ray_each  the same, trajectory by trajectory
    memory    the replay server: acquire, insert, lease, train, commit; the producer and the server check every value
    journal   the same with `replay.durability=journal`; `ack_*_ms` is from insert to durable acknowledgement
    *_tcp     the same two with `replay.local_sockets=false`: by tcp and encrypted, as between machines

Not all of them do the same work. `memory` / `two_hop` is the ratio to improve, and it includes what the bare proxy does
not do: the proxy acknowledges nothing, so that 150 groups and more are in its pipes (the replay's producer has at most
48 unacknowledged); it has no order, credit, check or second request for any group; and its consumer throws the bytes
away. `memory` / `decoded` compares two ways with the same end, arrays in the consumer. Its producer encodes as the
replay's does: a faster encoder helps both, and `two_hop` more, which does little else for short groups.

`cpu_us_per_group` is the CPU time of all processes together. It says more than the rates where others use the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path

from asyncrl import collector
from asyncrl.learner.batch.prefetch import LeasePrefetch
from asyncrl.replay.client.client import LearnerClient, RolloutClient
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.net.malloc import keep_heap
from asyncrl.replay.net.socket_options import LOOPBACK_SEND_BUFFER
from asyncrl.replay.serving import run_server
from asyncrl.settings.replay import ReplayConfig
from asyncrl.types import NO_VERSION, TrajectoryGroup
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.keys import some_keys
from benchmarks.parts.measuring import (
    GROUP_SIZE,
    Row,
    Size,
    cpu_seconds,
    family_cpu_seconds,
    free_address,
    make_group,
    make_trajectories,
    rates,
    rss_mb,
    spawn,
    started,
)
from benchmarks.parts.proxy import decode, measure_proxy, unpickle

STEP_BYTES = 32 << 20
"""Bytes of a batch, but a batch has at least 4 and at most 64 groups."""
WARM_STEPS = 3
IN_FLIGHT = 48
"""Limit on the groups that the producer has under way at once."""
SMOKE = {
    "seconds": 0.2,
    "repeats": 1,
    "tokens": [64],
    "only": ["two_hop", "two_hop_ipc", "decoded", "pickle", "memory", "journal"],
}


def measure_ray(size: Size, seconds: float, *options: str) -> Row:
    """Run `benchmarks.ray_queue` in a process of its own: Ray takes time from the others for as long as it runs."""
    options = ("--tokens", str(size.tokens), "--extras", str(size.extras), "--seconds", str(seconds), *options)
    command = [sys.executable, "-m", "benchmarks.ray_queue", *options]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(said.splitlines()[-1])["result"]


async def produce(config: ReplayConfig, size: Size, acks: Path) -> None:
    keep_heap()  # a rollout worker's process calls both
    collector.wake()
    client = RolloutClient(config.address, worker="producer", run_digest="d", config=config)
    board = await asyncio.to_thread(client.rendezvous().watch, 0, 30)
    await asyncio.to_thread(client.rendezvous().served, int(board.values["version"]), "f")
    waits: list[float] = []
    trajectories, free = make_trajectories(size), asyncio.Semaphore(IN_FLIGHT)

    async def insert(group: TrajectoryGroup) -> None:
        sent = time.perf_counter()
        await client.insert(group)
        waits.append((time.perf_counter() - sent) * 1e3)
        free.release()

    async with asyncio.TaskGroup() as running:
        ahead = running.create_task(client.acquire(slots=IN_FLIGHT, wait_s=1.0))
        while not (acquired := await ahead).stop:
            ahead = running.create_task(client.acquire(slots=IN_FLIGHT, wait_s=1.0))
            for order in acquired.assignments:
                await free.acquire()
                running.create_task(insert(make_group(trajectories, order)))
    await client.close()
    acks.write_text(json.dumps(waits))


def run_producer(config: ReplayConfig, size: Size, acks: Path) -> None:
    asyncio.run(produce(config, size, acks))


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


def measure_replay(size: Size, seconds: float, folder: Path, *, journal: bool, local: bool = True) -> Row:
    config = ReplayConfig(
        address=free_address(),
        keys=some_keys(),
        local_sockets=local,
        max_staleness=1 << 20,
        pipeline_depth=4,
    )
    groups_per_step = int(min(64, max(4, STEP_BYTES // size.nbytes)))
    place = folder / f"journal-{time.monotonic_ns()}" if journal else None
    server = spawn.Process(target=serve, args=(config, admission(groups_per_step), place), daemon=True)
    producer = spawn.Process(target=run_producer, args=(config, size, folder / "acks.json"), daemon=True)
    with started([server]):
        learner = begin(config)
        fetch = LearnerClient(config.address, rank=1, run_digest="d", config=config)
        with started([producer]):
            row = consume(learner, fetch, server, size, seconds, groups_per_step)
            learner.finish()
            producer.join(20)
        fetch.close()
        learner.close()
        server.join(20)
    waits = sorted(json.loads((folder / "acks.json").read_text()))
    row["ack_p50_ms"], row["ack_p99_ms"] = (waits[int(len(waits) * part)] for part in (0.5, 0.99))
    return row


def begin(config: ReplayConfig) -> LearnerClient:
    keep_heap()  # a learner's process calls both
    collector.wake()
    learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
    restored = learner.restore(step=None, policy_version=NO_VERSION, snapshot=None)
    learner.publish(policy_version=restored.next_version, parent=NO_VERSION)
    learner.announce({"version": restored.next_version})
    return learner


def consume(
    learner: LearnerClient,
    fetch: LearnerClient,
    server: BaseProcess,
    size: Size,
    seconds: float,
    groups_per_step: int,
) -> Row:
    """Consume batches as a learner that trains in no time, so that the replay's throughput sets the pace and not the
    latency of one answer.

    Two leases are under way, one more than for a real learner, which trains while a batch arrives and is decoded. The
    leases come on the connection of another rank than the one that reports, and no step waits for the commit of the
    step before: a real learner commits once per checkpoint.
    """
    leases = tuple(LeasePrefetch(fetch, rank=0, world=1, wait_s=30.0) for _ in range(2))
    for ahead in (0, 1):
        leases[ahead].ask(ahead)
    step, start, cpu, all_cpu = 0, 0.0, 0.0, 0.0
    with ThreadPoolExecutor(1) as commits:
        committed: Future[None] | None = None
        while step <= WARM_STEPS or time.perf_counter() - start < seconds:
            if step == WARM_STEPS:
                start, cpu, all_cpu = time.perf_counter(), cpu_seconds(server.pid), family_cpu_seconds()
            leases[step % 2].take(step)
            learner.trained(step=step, policy_version=step + 1)
            leases[step % 2].ask(step + 2)
            if committed is not None:
                committed.result()
            committed = commits.submit(learner.commit, step=step)
            step += 1
    elapsed, used = time.perf_counter() - start, cpu_seconds(server.pid) - cpu
    all_used = family_cpu_seconds() - all_cpu
    for ahead in (step, step + 1):
        leases[ahead % 2].take(ahead)
    groups = (step - WARM_STEPS) * groups_per_step
    cost = {"cpu_us_per_group": all_used / groups * 1e6, "server_cpu_us_per_group": used / groups * 1e6}
    return rates(groups, elapsed, size) | cost | {"server_rss_mb": rss_mb(server)}


CONTENDERS: dict[str, Callable[[Size, float, Path], Row]] = {
    "two_hop": lambda size, seconds, folder: measure_proxy(size, seconds),
    "two_hop_b": lambda size, seconds, folder: measure_proxy(size, seconds, send_buffer=LOOPBACK_SEND_BUFFER),
    "two_hop_ipc": lambda size, seconds, folder: measure_proxy(
        size, seconds, send_buffer=LOOPBACK_SEND_BUFFER, sockets=folder
    ),
    "forward": lambda size, seconds, folder: measure_proxy(size, seconds, in_python=True),
    "decoded": lambda size, seconds, folder: measure_proxy(size, seconds, decode),
    "pickle": lambda size, seconds, folder: measure_proxy(size, seconds, unpickle),
    "ray": lambda size, seconds, folder: measure_ray(size, seconds),
    "ray_each": lambda size, seconds, folder: measure_ray(size, seconds, "--each"),
    "memory": lambda size, seconds, folder: measure_replay(size, seconds, folder, journal=False),
    "journal": lambda size, seconds, folder: measure_replay(size, seconds, folder, journal=True),
    "memory_tcp": lambda size, seconds, folder: measure_replay(size, seconds, folder, journal=False, local=False),
    "journal_tcp": lambda size, seconds, folder: measure_replay(size, seconds, folder, journal=True, local=False),
}


def compare(names: list[str], sizes: list[Size], seconds: float, repeats: int) -> dict[str, dict[str, Row]]:
    """Return the median of each number over the repeats. Contenders take turns, so that changes of the machine's speed
    affect all of them alike."""
    rows: dict[tuple[Size, str], list[Row]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as folder:
        for _ in range(repeats):
            for size in sizes:
                for name in names:
                    rows.setdefault((size, name), []).append(CONTENDERS[name](size, seconds, Path(folder)))
    return {
        str(size.tokens): {
            name: {
                key: round(statistics.median(row[key] for row in rows[size, name]), 2) for key in rows[size, name][0]
            }
            for name in names
        }
        for size in sizes
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--extras-mb", type=float, default=0.0, help="of one group, in one array of each trajectory")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    options = parse(parser, SMOKE)
    sizes = [Size(tokens, int(options.extras_mb * 1e6)) for tokens in options.tokens]
    found = compare(options.only, sizes, options.seconds, options.repeats)
    answer("replay", {"group_size": GROUP_SIZE, **found}, smoke=options.smoke)


if __name__ == "__main__":
    main()
