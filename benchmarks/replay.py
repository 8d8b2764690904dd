"""How many groups per second flow from insert to lease through one replay server, and what does each cost it?

    python benchmarks/replay.py [--seconds 4] [--groups-per-step 64]

Three processes: server, one producer, this one as the learner. One JSON line with, per size of group, groups/s, MB/s
and the CPU microseconds of the server per group (acquire, insert, lease and trained together).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import time
from pathlib import Path

import numpy as np

from asyncrl.config import ReplayConfig
from asyncrl.replay.admission import AdmissionSettings
from asyncrl.replay.client import LearnerClient, RolloutClient
from asyncrl.replay.server import run_server
from asyncrl.types import NO_VERSION, StalePolicy, Trajectory, TrajectoryGroup

GROUP_SIZE = 8
CASES = {"12_tokens": 12, "1k_tokens": 1024, "8k_tokens": 8192}


def make_group(tokens: int) -> tuple[Trajectory, ...]:
    prompt = max(1, tokens // 4)
    mask = np.arange(tokens) >= prompt
    trajectory = Trajectory(
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        policy_versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
        reward=1.0,
    )
    return (trajectory,) * GROUP_SIZE


async def produce(config: ReplayConfig, tokens: int) -> None:
    client = RolloutClient(config.address, worker="producer", run_digest="d", config=config)
    trajectories = make_group(tokens)
    board = await client.watch(revision=0, wait_s=30)
    await client.served(int(board.values["version"]), "f")
    running: set[asyncio.Task] = set()
    while True:
        acquired = await client.acquire(slots=256 - len(running), wait_s=1.0)
        if acquired.stop:
            break
        for order in acquired.assignments:
            group = TrajectoryGroup(
                group_id=order.group_id,
                prompt_index=order.prompt_index,
                attempt=order.attempt,
                worker="producer",
                trajectories=trajectories,
            )
            task = asyncio.create_task(client.insert(group))
            running.add(task)
            task.add_done_callback(running.discard)
        while len(running) > 192:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    await client.close()


def run_producer(config: ReplayConfig, tokens: int) -> None:
    asyncio.run(produce(config, tokens))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100.0


def rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def measure(tokens: int, seconds: float, groups_per_step: int) -> dict[str, float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = ReplayConfig(address=f"tcp://127.0.0.1:{port}", max_staleness=1 << 20, pipeline_depth=4)
    settings = AdmissionSettings(
        groups_per_step=groups_per_step,
        group_size=GROUP_SIZE,
        max_staleness=1 << 20,
        pipeline_depth=4,
        max_in_flight=512,
        stale_policy=StalePolicy.MASK,
    )
    spawn = multiprocessing.get_context("spawn")
    server = spawn.Process(target=run_server, args=(config, settings, "bench", "d", 0))
    producer = spawn.Process(target=run_producer, args=(config, tokens))
    server.start()
    learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
    restored = learner.restore(step=None, policy_version=NO_VERSION, snapshot=None)
    assert server.pid is not None
    idle_mb = rss_mb(server.pid)
    learner.publish(policy_version=restored.next_version, parent=NO_VERSION)
    learner.announce({"version": restored.next_version})
    producer.start()
    step, start, cpu, warm = 0, 0.0, 0.0, 4
    while step <= warm or time.perf_counter() - start < seconds:
        learner.lease(step=step, rank=0, world=1, wait_s=30)
        learner.trained(step=step, policy_version=step + 1)
        learner.commit(step=step)
        step += 1
        if step == warm:
            start, cpu = time.perf_counter(), cpu_seconds(server.pid)
    elapsed, used = time.perf_counter() - start, cpu_seconds(server.pid) - cpu
    groups = (step - warm) * groups_per_step
    row = {
        "groups_per_s": round(groups / elapsed, 1),
        "mb_per_s": round(groups * GROUP_SIZE * tokens * 9 / elapsed / 1e6, 2),
        "server_cpu_us_per_group": round(used / groups * 1e6, 1),
        "server_idle_rss_mb": round(idle_mb, 1),
        "server_rss_mb": round(rss_mb(server.pid), 1),
    }
    learner.finish()
    producer.join(20)
    learner.close()
    server.join(20)
    for process in (producer, server):
        if process.is_alive():
            process.terminate()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--groups-per-step", type=int, default=64)
    options = parser.parse_args()
    rows = {name: measure(tokens, options.seconds, options.groups_per_step) for name, tokens in CASES.items()}
    print(json.dumps({"benchmark": "replay", "group_size": GROUP_SIZE, **rows}))


if __name__ == "__main__":
    main()
