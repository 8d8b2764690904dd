"""Does a version reach the engines sooner when every learner rank sends its share than when rank 0 gathers and sends
everything?

    python -m benchmarks.senders [--parameters 10000000] [--ranks 4] [--engines 2] [--processes 1] [--rounds 5]
        [--slices]

Learner ranks shard a model with FSDP2 over gloo. Every process of every engine receives whole tensors, or with
`--slices` its part of their rows, and loads nothing. `staged_bytes` is what one such process holds. In each round both
ways publish one version in turn, after a barrier of the ranks; ratios are medians over rounds of what was measured in
one round. `copy_s` is how long rank 0's optimizer would wait for the copy if it had nothing to compute meanwhile.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from asyncrl.weights.boxes import Box
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.staging import Staging
from asyncrl.weights.broadcast.subscriber import BroadcastSubscriber
from asyncrl.weights.broadcast.together import ShareSender, agree
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.publishing.snapshot import BackgroundPublisher
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.board import TIMEOUT_S, BoardManager, Rendezvous

SMOKE = {"parameters": 100_000, "ranks": 2, "engines": 1, "rounds": 1}
WAYS = ("rank0", "all")


def shape_of(parameters: int) -> tuple[int, int]:
    """Return the number of square layers of a model of `parameters` parameters, and the side of each."""
    layers = 4 if parameters < 1_000_000 else 24
    return layers, max(int((parameters / layers) ** 0.5), 1)


def model(parameters: int, world: int) -> torch.nn.Module:
    """Return a model of square layers, sharded over `world` ranks."""
    layers, side = shape_of(parameters)
    net = torch.nn.ModuleList(torch.nn.Linear(side, side, bias=False) for _ in range(layers))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    return net


def kept(args: argparse.Namespace, process: int) -> dict[str, tuple[Box, ...]] | None:
    """Return the rows of every layer that a process of an engine receives; None if it receives whole tensors."""
    layers, side = shape_of(args.parameters)
    rows = side * process // args.processes, side * (process + 1) // args.processes
    return {f"{i}.weight": ((rows, (0, side)),) for i in range(layers)} if args.slices else None


def receiver(boards: dict[str, Any], staged: Any, worker: str, process: int, args: argparse.Namespace) -> None:
    """Run a process of an engine, which joins one group for each way."""
    torch.set_num_threads(1)
    ends = []
    for board in boards.values():
        staging = Staging()
        staging.keeps = kept(args, process)
        board.join(worker)
        ends.append(
            BroadcastSubscriber(
                Rendezvous(board, [0.0]), lambda version, tensors, staging=staging: staged.append(staging.nbytes),
                worker=worker, incarnation="1", timeout_s=TIMEOUT_S, receiver=staging,
            )
        )  # fmt: skip
    time.sleep(3600)
    for end in ends:
        end.close()


def publisher_of(way: str, board: Any, rank: int, world: int) -> BackgroundPublisher:
    shared = way == "all"
    sender: BroadcastSender | ShareSender | None = None
    if rank == 0:
        sender = BroadcastSender(board, Link(host="127.0.0.1", timeout_s=TIMEOUT_S), senders=world if shared else 1)
    if shared:
        meeting = agree(sender.meeting if isinstance(sender, BroadcastSender) else None, torch.device("cpu"))
        sender = sender or ShareSender(meeting, rank, Link(host="127.0.0.1", timeout_s=TIMEOUT_S))
    return BackgroundPublisher(
        sender,
        wire_dtype=torch.float32,
        bucket_bytes=64 << 20,
        wait_s=TIMEOUT_S,
        ranks=(rank, world) if shared else None,
    )


def learner(boards: dict[str, Any], found: Any, rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", args.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
    net, receivers = model(args.parameters, args.ranks), args.engines * args.processes
    named = [(name, parameter.detach()) for name, parameter in net.named_parameters()]
    publishers = {way: publisher_of(way, boards[way], rank, args.ranks) for way in WAYS}
    for version in range(args.rounds + 1):
        row: dict[str, float] = {}
        for way in WAYS if version % 2 else reversed(WAYS):
            dist.barrier()
            started = time.time()
            publishers[way].publish(version, named)
            publishers[way].wait_copied()
            copied = time.time() - started
            served = boards[way].served(version, receivers, TIMEOUT_S)
            if len(served) < receivers:
                raise TimeoutError(f"{way}: version {version} was served by {len(served)} of {receivers}")
            row |= {f"{way}_update_s": max(when for when, _ in served) - started, f"{way}_copy_s": copied}
        if rank == 0 and version:  # the first version forms the groups and is not counted
            found.append(row)
    if rank == 0:
        sent = {f"{way}_wire_bytes": publishers[way].stats()["weights/wire_bytes"] for way in WAYS}
        found.append({"bytes": sum(p.numel() * 4 for _, p in named), **sent})
    for publisher in publishers.values():
        publisher.close()
    dist.barrier()
    dist.destroy_process_group()


def measure(args: argparse.Namespace) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, BoardManager() as manager, context.Manager() as shared:
        boards = {way: manager.Board() for way in WAYS}  # pyright: ignore
        found, staged = shared.list(), shared.list()
        ranks = [
            context.Process(target=learner, args=(boards, found, rank, args, folder), daemon=True)
            for rank in range(args.ranks)
        ]
        engines = [
            context.Process(target=receiver, args=(boards, staged, f"w{i}.{j}", j, args), daemon=True)
            for i in range(args.engines)
            for j in range(args.processes)
        ]
        for process in ranks + engines:
            process.start()
        for process in ranks:
            process.join()
        for process in engines:
            process.kill()
            process.join(10)
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"learner ranks ended with {[process.exitcode for process in ranks]}")
        *rows, sizes = list(found)
        sizes |= {"staged_bytes": max(staged)}
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    ratio = statistics.median(row["all_update_s"] / row["rank0_update_s"] for row in rows)
    return {**sizes, **{name: round(value, 4) for name, value in medians.items()}, "all_over_rank0": round(ratio, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1, help="of each engine")
    parser.add_argument("--slices", action="store_true", help="each process receives its part of the rows alone")
    parser.add_argument("--rounds", type=int, default=5)
    args = parse(parser, SMOKE)
    answer("senders", {**measure(args), **shape(args)}, smoke=args.smoke)


def shape(args: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(args, name) for name in ("ranks", "engines", "processes", "slices", "rounds")}


if __name__ == "__main__":
    main()
