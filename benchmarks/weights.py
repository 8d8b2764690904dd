"""What does publishing weights cost, by phase, compared with a bare broadcast of the same bytes?

    python -m benchmarks.weights [--parameters 10000000 100000000 500000000] [--receivers 1] [--rounds 5]
    python -m benchmarks.weights --parameters --members 1 8 64 512

One learner process sends to receivers in processes of their own, on loopback. Every round measures, one after another:
the bare broadcast, in pieces, over the sockets that the updates use; a copy of the weights alone; AdamW's step alone;
updates of an idle learner, two with fingerprints and two without, in symmetric order; two updates while the learner has
nothing to compute and steps at once (`stepping_`: AdamW waits until the version is sent); and one update while the
learner computes forward and backward as the loop does, for at least `--compute` times the copy, before its step
(`busy_`). `cpu_s` are the seconds of all processes: divided by the cores, they are the least that an update can take.
Ratios are medians over rounds of what was measured in one round.

What the learner loses to an update is measured in two ways. `learner_stall` is how long it waits (in `publish`, and in
the step until the version is sent). `learner_delay` is how much longer `publish` and the step take together than the
step alone; it includes what the sending takes from the learner's cores. `extra_memory` is how far the process grows
beyond its weights, gradients and moments until the third version is served.

`--members`: the cost of an update besides the bytes, and of the group when nothing is sent, with that many simulated
members (`benchmarks/parts/crowd.py`): cores and seconds of the learner's rank 0. Prints one JSON line, with the load of
the machine before the measurement.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from asyncrl.engines.parameters import ParameterTable
from asyncrl.settings.weights import WeightsConfig
from asyncrl.weights.broadcast import receive, sending
from asyncrl.weights.broadcast.group import WeightGroup, connect_store, host_store
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.subscriber import BroadcastSubscriber
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.fingerprint import Fingerprint
from asyncrl.weights.publishing.gather import manifest_of
from asyncrl.weights.publishing.publisher import WeightPublisher
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.board import TIMEOUT_S, BoardManager, Rendezvous
from benchmarks.parts.crowd import IDLE_S, control_cost

SMOKE = {"parameters": [100_000], "rounds": 1, "members": [2]}
PATIENCE_S = 600.0
"""Timeout of the bare group, which stands idle while the rest of a round is measured."""

STEPPING = ("learner_stall_s", "learner_delay_s", "step_alone_s", "update_s")


class Silent(Fingerprint):
    """Hashes nothing. What fingerprints cost is the difference."""

    def update(self, piece: torch.Tensor) -> None: ...

    def update_bytes(self, piece: memoryview) -> None: ...


def switch_by(on: Any) -> None:
    def made() -> Fingerprint:
        return Fingerprint() if on.value else Silent()

    receive.Fingerprint = sending.Fingerprint = made


class Table(torch.nn.Module):
    """Tensors like those of a transformer of `parameters` parameters: 12 tensors per layer, 2 or 24 layers."""

    def __init__(self, parameters: int, *, random: bool) -> None:
        """Args: random: make random parameters that can be trained, instead of zeros."""
        super().__init__()
        layers = 2 if parameters < 1_000_000 else 24
        each = parameters // (layers * 12)
        make = torch.randn if random else torch.zeros
        self.layers = torch.nn.ModuleList(
            torch.nn.ParameterDict({f"w{j}": torch.nn.Parameter(make(each), requires_grad=random) for j in range(12)})
            for _ in range(layers)
        )


def receiver(board: Any, on: Any, worker: str, parameters: int) -> None:
    torch.set_num_threads(1)
    switch_by(on)
    loads: list[float] = []
    table = ParameterTable(Table(parameters, random=False))

    def load(_: int, tensors: Mapping[str, torch.Tensor]) -> None:
        table.check(tensors)
        started = time.perf_counter()
        table.load(tensors)
        loads.append(time.perf_counter() - started)

    board.join(worker)
    subscriber = BroadcastSubscriber(
        Rendezvous(board, loads), load, worker=worker, incarnation="1", timeout_s=TIMEOUT_S
    )
    time.sleep(3600)
    subscriber.close()


BARE = {"bare_broadcast": "sockets"}  # name -> backend


def bare_groups(store: Any, rank: int, world: int) -> dict[str, WeightGroup]:
    def group(name: str) -> WeightGroup:
        link = Link(backend=BARE[name], host="127.0.0.1", timeout_s=PATIENCE_S)
        return WeightGroup(store, link, epoch=0, rank=rank, world=world, name=name)

    return {name: group(name) for name in BARE}


def broadcast(group: WeightGroup, buffer: torch.Tensor) -> None:
    for piece in group.pieces(buffer):
        group.wait(group.broadcast(piece))


def bare_receiver(port: int, rank: int, world: int, nbytes: int, rounds: int) -> None:
    torch.set_num_threads(1)
    groups = bare_groups(connect_store("127.0.0.1", port, TIMEOUT_S), rank, world)
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    for name in [*BARE, *reversed(BARE)] * rounds:
        broadcast(groups[name], buffer)


def cpu_of(pids: Iterable[int | None]) -> float:
    """Return the CPU seconds of this process and of those `pids`."""
    clocks = [(~pid << 3) | 2 for pid in pids if pid is not None]  # as clock_getcpuclockid computes it
    return time.process_time() + sum(map(time.clock_gettime, clocks))


class BareBroadcast:
    """Broadcasts the same bytes between as many processes, and does nothing else: in each round by every backend in
    turn, and then in reverse."""

    def __init__(self, nbytes: int, receivers: int, rounds: int) -> None:
        self._store, port = host_store("127.0.0.1", TIMEOUT_S)
        context, world = multiprocessing.get_context("spawn"), receivers + 1
        self._pids: list[int | None] = []
        for rank in range(1, world):
            args = (port, rank, world, nbytes, rounds)
            process = context.Process(target=bare_receiver, args=args, daemon=True)
            process.start()
            self._pids.append(process.pid)
        self._groups = bare_groups(self._store, 0, world)
        self._buffer = torch.zeros(nbytes, dtype=torch.uint8)

    def seconds(self, name: str) -> tuple[float, float]:
        """Return the seconds of one broadcast, and the CPU seconds of all processes."""
        started, cpu = time.perf_counter(), cpu_of(self._pids)
        broadcast(self._groups[name], self._buffer)
        seconds = time.perf_counter() - started
        time.sleep(0.001 + seconds / 10)  # until the receivers have it too
        return seconds, cpu_of(self._pids) - cpu


class Compute:
    """Repeats forward and backward of a small model, as the loop does between two optimizer steps."""

    def __init__(self) -> None:
        self._layers = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
        self._batch = torch.randn(256, 512)

    def for_seconds(self, seconds: float) -> None:
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            self._layers(self._batch).square().mean().backward()
        self._layers.zero_grad()


class Watched(WeightPublisher):
    """A publisher that adds up the seconds that optimizers wait."""

    waited_s = 0.0

    def wait(self) -> float:
        seconds = super().wait()
        self.waited_s += seconds
        return seconds


def resident(name: str) -> int:
    """Return the bytes of memory of this process: `VmRSS` for the present, `VmHWM` for the peak."""
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


class Learner:
    """Publishes one version after another and measures each."""

    def __init__(self, board: Any, parameters: int, receivers: int, bucket: int) -> None:
        self._board, self._receivers = board, receivers
        self._model = dict(Table(parameters, random=True).named_parameters())
        self._compute = Compute()
        self._gradients = [torch.randn_like(parameter) for parameter in self._model.values()]
        self._optimizer = torch.optim.AdamW(self._model.values(), lr=1e-6, fused=True)
        self._manifest = manifest_of(list(self._model.items()), torch.float32, bucket)
        self._spare = self._manifest.views(self._manifest.allocate())
        self.nbytes = sum(tensor.nbytes for tensor in self._model.values())
        self.step_alone()
        self.copy_alone()
        self._before = self.extra_memory = 0
        sender = BroadcastSender(board, Link(host="127.0.0.1", timeout_s=TIMEOUT_S))
        self._publisher = Watched(sender, wire_dtype=torch.float32, bucket_bytes=bucket, wait_s=TIMEOUT_S)
        self._optimizer.register_step_pre_hook(self._before_step)
        self._version = -1

    def begin(self, receivers: Sequence[int | None]) -> None:
        """Publish the first version and wait until all receivers (process ids) serve it. One that arrives after the
        step would get the next version instead."""
        self._pids = receivers
        self._before, self._version = resident("VmRSS"), 0
        self._publisher.publish(0, self._published())
        self._served()

    def copy_alone(self) -> float:
        """Return the seconds of a copy of the weights."""
        started = time.perf_counter()
        for name, parameter in self._published():
            self._spare[name].copy_(parameter)
        return time.perf_counter() - started

    def _before_step(self, *_: object) -> None:
        if self._version >= 0:
            self._publisher.wait()

    def step_alone(self) -> float:
        """Return the seconds of the optimizer's step, which waits until the version is sent."""
        for parameter, gradient in zip(self._model.values(), self._gradients, strict=True):
            parameter.grad = gradient
        started = time.perf_counter()
        self._optimizer.step()
        return time.perf_counter() - started

    def _published(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, parameter.detach()) for name, parameter in self._model.items()]

    def update(self, compute_s: float = 0.0, *, step: bool = True) -> dict[str, float]:
        """Publish one update, with a learner that computes for `compute_s` before its optimizer's step, or does nothing
        until it is served."""
        self._version += 1
        alone, waited = self.step_alone(), self._publisher.waited_s
        started, clock = time.time(), time.perf_counter()
        together = cpu_of(self._pids)
        self._publisher.publish(self._version, self._published())
        called = time.perf_counter() - clock
        self._compute.for_seconds(compute_s)
        computed = time.perf_counter() - clock - called
        stepped = self.step_alone() if step else alone
        served, load_s = self._served()
        stats = self._sent()
        if self._version == 2:
            self.extra_memory = resident("VmHWM") - self._before
        return {
            "learner_stall_s": called + self._publisher.waited_s - waited,
            "learner_delay_s": called + stepped - alone,
            "step_alone_s": alone,
            "compute_s": computed,
            "gather_s": stats["weights/gather_s"],
            "wire_s": stats["weights/wire_s"],
            "engine_stall_s": load_s,
            "update_s": served - started,
            "cpu_s": cpu_of(self._pids) - together,
        }

    def close(self) -> None:
        self._publisher.close()

    def _served(self) -> tuple[float, float]:
        """Return (time at which the last receiver served the version, its load seconds)."""
        found = self._board.served(self._version, self._receivers, TIMEOUT_S)
        if len(found) < self._receivers:
            raise TimeoutError(f"version {self._version} was served by {len(found)} receivers in {TIMEOUT_S} s")
        return max(found)

    def _sent(self) -> dict[str, float]:
        """Return the publisher's figures for this version. They are complete when every receiver has answered."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._publisher.stats()["weights/sent_version"] != self._version:
            if time.monotonic() > deadline:
                raise TimeoutError(f"version {self._version} was not acknowledged in {TIMEOUT_S} s")
            time.sleep(0.001)
        return self._publisher.stats()


def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.mean(row[name] for row in rows) for name in rows[0]}


def one_round(learner: Learner, bare: BareBroadcast, on: Any, compute: float) -> dict[str, float]:
    """Measure everything once. What is compared is measured in symmetric order."""
    before = {name: bare.seconds(name) for name in BARE}
    alone = learner.copy_alone()
    updates: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for hashed in (True, False, False, True):
        on.value = hashed
        updates[hashed].append(learner.update(step=False))
    idle, plain = map(means, updates.values())
    on.value = True
    stepping = means([learner.update(), learner.update()])
    busy = learner.update(compute * alone)
    alone = (alone + learner.copy_alone()) / 2
    row = {"copy_alone_s": alone}
    for name in reversed(BARE):
        both = zip(before[name], bare.seconds(name), strict=True)
        row[f"{name}_s"], row[f"{name}_cpu_s"] = map(statistics.mean, both)
    row |= {name: idle[name] for name in ("gather_s", "wire_s", "engine_stall_s", "update_s", "cpu_s")}
    row |= {f"busy_{name}": busy[name] for name in ("learner_stall_s", "compute_s", "gather_s", "update_s")}
    row |= {f"stepping_{name}": stepping[name] for name in STEPPING}
    row["fingerprints_s"] = idle["update_s"] - plain["update_s"]
    row["fingerprints_cpu_s"] = idle["cpu_s"] - plain["cpu_s"]
    return row | {
        "cpu_over_bare": row["cpu_s"] / row["bare_broadcast_cpu_s"],
        "update_over_bare": row["update_s"] / row["bare_broadcast_s"],
        "engine_stall_over_update": idle["engine_stall_s"] / idle["update_s"],
        "learner_stall_over_update": busy["learner_stall_s"] / busy["update_s"],
        "stepping_update_over_bare": stepping["update_s"] / row["bare_broadcast_s"],
        "learner_stall_over_update_without_compute": stepping["learner_stall_s"] / stepping["update_s"],
        "learner_delay_over_update_without_compute": stepping["learner_delay_s"] / stepping["update_s"],
        "fingerprints_over_transfer": row["fingerprints_s"] / plain["wire_s"],
        "fingerprints_over_cpu": row["fingerprints_cpu_s"] / plain["cpu_s"],
    }


def measure(parameters: int, receivers: int, rounds: int, bucket: int, compute: float) -> dict[str, float]:
    """Return medians over `rounds` rounds, after one round of warm-up."""
    context = multiprocessing.get_context("spawn")
    on = context.Value("b", True, lock=False)
    switch_by(on)
    with BoardManager() as manager:
        board = manager.Board()  # pyright: ignore
        learner = Learner(board, parameters, receivers, bucket)
        bare = BareBroadcast(learner.nbytes, receivers, rounds + 1)
        others = [
            context.Process(target=receiver, args=(board, on, f"w{i}", parameters), daemon=True)
            for i in range(receivers)
        ]
        for process in others:
            process.start()
        learner.begin([process.pid for process in others])
        rows = [one_round(learner, bare, on, compute) for _ in range(rounds + 1)][1:]
        learner.close()
        for process in others:
            process.kill()
            process.join(10)
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    sizes: dict[str, float] = {"bytes": learner.nbytes, "extra_memory": learner.extra_memory}
    sizes["extra_memory_over_bucket"] = round(learner.extra_memory / min(bucket, learner.nbytes), 2)
    return {"parameters": parameters, **sizes, **rounded(medians)}


def rounded(found: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="*", default=[10_000_000, 100_000_000, 500_000_000])
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--bucket-mb", type=int, default=WeightsConfig().bucket_mb)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--members", type=int, nargs="*", default=[])
    parser.add_argument("--compute", type=float, default=1.5, help="forward and backward, as a multiple of the copy")
    args = parse(parser, SMOKE)
    torch.set_num_threads(1)
    load, idle = os.getloadavg()[0], 0.1 if args.smoke else IDLE_S
    results = [
        measure(parameters, args.receivers, args.rounds, args.bucket_mb << 20, args.compute)
        for parameters in args.parameters
    ]
    control = [rounded(control_cost(members, 4 * args.rounds, idle)) for members in args.members]
    found = {
        "receivers": args.receivers,
        "load_before": load,
        "updates": results,
        "control": control,
    }
    answer("weights", found, smoke=args.smoke)


if __name__ == "__main__":
    main()
