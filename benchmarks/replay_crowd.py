"""Does the replay server stay small with many workers, and what does a group cost it?

    python -m benchmarks.replay_crowd [--workers 1000] [--groups 1000000]

Connects `--workers` workers that insert tiny groups into a replay server without a journal. Prints one JSON line:
groups per second, CPU time of the server per group, and its memory.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import zmq

from asyncrl.learner.batch.prefetch import LeasePrefetch
from asyncrl.replay.client.client import LearnerClient
from asyncrl.replay.codec import headers, wire
from asyncrl.replay.codec.group import encode_group
from asyncrl.replay.codec.reply import decode_replies
from asyncrl.replay.codec.wire import Envelope
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.net.keys import secure_client
from asyncrl.replay.serving import run_server
from asyncrl.settings.replay import ReplayConfig
from asyncrl.types import NO_VERSION
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.keys import some_keys
from benchmarks.parts.measuring import (
    GROUP_SIZE,
    Size,
    cpu_seconds,
    free_address,
    make_group,
    make_trajectories,
    rss_mb,
    spawn,
    started,
)

WARM_STEPS = 3
GROUPS_PER_STEP = 1024


def serve(config: ReplayConfig) -> None:
    settings = AdmissionSettings(
        groups_per_step=GROUPS_PER_STEP,
        group_size=GROUP_SIZE,
        max_staleness=1 << 20,
        pipeline_depth=4,
        max_in_flight=8192,
    )
    run_server(config, settings, "bench", "d", 0, folder=None)


def run_crowd(config: ReplayConfig, workers: int, run_id: str) -> None:
    """Run `workers` connected sockets in one process. Each asks for orders and inserts the groups ordered."""
    Crowd(config, workers, run_id).run()


class Crowd:
    def __init__(self, config: ReplayConfig, workers: int, run_id: str) -> None:
        self.context, self.poller, self.run_id = zmq.Context(), zmq.Poller(), run_id
        self.context.set(zmq.MAX_SOCKETS, workers + 64)
        self.names: dict[zmq.Socket, str] = {}
        self.requests: dict[zmq.Socket, int] = {}
        self.under_way: dict[zmq.Socket, int] = {}
        self.stopped: set[zmq.Socket] = set()
        for number in range(workers):
            peer = self.context.socket(zmq.DEALER)
            peer.setsockopt(zmq.LINGER, 0)
            secure_client(peer, config.keys, "worker")
            peer.connect(config.address)
            self.names[peer], self.requests[peer], self.under_way[peer] = f"w{number}", 0, 0
            self.poller.register(peer, zmq.POLLIN)
        template = encode_group(make_group(make_trajectories(Size(16))))
        self.frames, self.header = template.frames, template.header

    def run(self) -> None:
        for peer, name in self.names.items():
            self._send(peer, "hello", ["worker", name, "d", 0, ""], plain=True)
        beat = time.monotonic()
        while len(self.stopped) < len(self.names):
            for peer, _ in self.poller.poll(1000):
                while peer.poll(0):
                    for reply, _ in decode_replies(peer.recv_multipart()):
                        self._take(peer, reply)
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
        # `number` acknowledges the answers to all earlier requests. Those still under way are never asked for again.
        asked = body if plain else [number, body]
        envelope = Envelope(run=run, verb=verb, request=number, incarnation=name, body=asked)
        peer.send_multipart([wire.encode_envelope(envelope), *(frames or [])])

    def _take(self, peer: zmq.Socket, reply: Envelope) -> None:
        if reply.verb != "ok":
            raise AssertionError(f"{reply.verb}: {reply.body}")
        body = reply.body
        if body is None or (isinstance(body, list) and len(body) == 3 and body[0] == self.run_id):
            self._send(peer, *(("served", [0, "f"]) if body else ("acquire", [4, 5.0])))
        elif len(body) == 4 and isinstance(body[3], str):  # the reply to a heartbeat has four fields too
            self._orders(peer, body)
        elif body[0] in ("accepted", "fenced", "closed"):  # the end of the run fences what is still under way
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
            header = replace(self.header, group_id=group_id, prompt_index=prompt_index, attempt=attempt)
            self._send(peer, "insert", [headers.encode_group_header(header), None], list(self.frames))
        if not orders:
            self._send(peer, "acquire", [4, 5.0])


def measure_crowd(workers: int, groups: int) -> dict[str, float | list[float]]:
    config = ReplayConfig(address=free_address(), keys=some_keys(), max_staleness=1 << 20, heartbeat_timeout_s=120.0)
    server = spawn.Process(target=serve, args=(config,), daemon=True)
    with started([server]):
        learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
        restored = learner.restore(step=None, policy_version=NO_VERSION, snapshot=None)
        learner.publish(policy_version=restored.next_version, parent=NO_VERSION)
        crowd = spawn.Process(target=run_crowd, args=(config, workers, "bench"), daemon=True)
        with started([crowd]):
            leases = LeasePrefetch(learner, rank=0, world=1, wait_s=120.0)
            steps, memory = max(WARM_STEPS + 2, groups // GROUPS_PER_STEP), []
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
    counted = (steps - WARM_STEPS - 1) * GROUPS_PER_STEP
    return {
        "workers": workers,
        "groups": steps * GROUPS_PER_STEP,
        "groups_per_s": round(counted / elapsed, 1),
        "server_cpu_us_per_group": round(used / counted * 1e6, 1),
        "rss_mb_of_quarters": [round(memory[part * (steps - 1) // 4], 1) for part in range(5)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--groups", type=int, default=1_000_000)
    options = parse(parser, {"workers": 8, "groups": 0})
    answer("replay_crowd", measure_crowd(options.workers, options.groups), smoke=options.smoke)


if __name__ == "__main__":
    main()
