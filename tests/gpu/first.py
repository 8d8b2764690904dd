"""What the first minutes on a GPU should show, in the order of what would be worth all of the time if it failed:

    python -m tests.gpu.first [--device cuda|cpu] [--only BLOCK ...]

Each block runs in a process of its own that is killed at its limit, all together in less than 12 minutes on an H200.
Prints a JSON line for each block, and last one for all, in the form of the lines in benchmarks/results. A block that
fails among the first two, which everything else stands on, ends it. On a CPU the same code runs at tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.cuda import nccl

from asyncrl.checks.placement import DEVICES, NVIDIA, VISIBLE, unplaced_gpus, visible_gpus
from benchmarks.parts.answer import ROOT, commit, machine

Found = dict[str, Any]
ALL_S = 720.0
"""Longest time of all blocks together."""
FIRST = ("facts", "collectives")
"""Blocks without which nothing else is worth running."""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Least seconds of a call, after one that does not count."""
    seconds = []
    for _ in range(repeats + 1):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def facts(device: torch.device) -> Found:
    """Which GPUs torch and asyncrl see. Fails if torch sees more."""
    found: Found = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver folder": len(list(NVIDIA.iterdir())) if NVIDIA.is_dir() else None,
        "device files": sorted(file.name for file in DEVICES.glob("nvidia*")),
        VISIBLE: os.environ.get(VISIBLE),
        "visible": visible_gpus(),
        "torch sees": torch.cuda.device_count(),
    }
    if device.type == "cuda":
        found |= {"nccl": nccl.version(), "name": torch.cuda.get_device_name(device)}
        torch.cuda.current_device()
        found["context after current_device"] = torch._C._cuda_hasPrimaryContext(0)  # pyright: ignore[reportAttributeAccessIssue]
    if problem := unplaced_gpus(torch.cuda.device_count()):
        raise RuntimeError(problem)
    return found


@contextmanager
def joined(backend: str, store: Any, world: int, timeout_s: float) -> Iterator[None]:
    dist.init_process_group(backend, store=store, rank=0, world_size=world, timeout=timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        dist.destroy_process_group()


def collectives(device: torch.device) -> Found:
    """A group of one forms, broadcasts in pieces, leaves and forms again; one whose peer never comes ends in time."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    piece = torch.ones((64 << 20) // 4 if device.type == "cuda" else 256, device=device)
    seconds = []
    for _ in range(2):
        with joined(backend, HashStore(), 1, 30.0):
            seconds.append(timed(lambda: [dist.broadcast(piece, 0) for _ in range(16)], device))
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    began = time.perf_counter()
    try:
        with joined(backend, store, 2, 5.0):
            work = dist.broadcast(piece, 0, async_op=True)
            assert work is not None
            work.wait()
        raise AssertionError("a broadcast to a peer that never came ended well")
    except RuntimeError:  # DistBackendError, DistStoreError
        waited = time.perf_counter() - began
    assert waited < 30, f"a peer that never came was waited for for {waited:.0f} s, with a timeout of 5"
    return {
        "seconds of 16 pieces": round(min(seconds), 4),
        "seconds until an absent peer is given up": round(waited, 1),
    }


def copies(device: torch.device) -> Found:
    """GB/s of float32 weights to bfloat16 in host memory: cast on the way, on the device, and into pinned memory."""
    count, size = (64, 16 << 20) if device.type == "cuda" else (4, 1 << 14)
    weights = [torch.randn(size, device=device) for _ in range(count)]
    plain = [torch.empty(size, dtype=torch.bfloat16) for _ in weights]
    pinned = [torch.empty(size, dtype=torch.bfloat16, pin_memory=device.type == "cuda") for _ in range(2)]

    def cast_here() -> None:
        for mine, weight in zip(plain, weights, strict=True):
            mine.copy_(weight.bfloat16())

    def into_pinned() -> None:
        for number, weight in enumerate(weights):
            pinned[number % 2].copy_(weight.bfloat16(), non_blocking=True)

    ways = {"cast on the way": lambda: torch._foreach_copy_(plain, weights), "cast on the device": cast_here}
    ways["cast on the device, pinned"] = into_pinned
    return {name: round(count * size * 4 / 1e9 / timed(way, device), 2) for name, way in ways.items()}


def head(device: torch.device) -> Found:
    """Seconds of logits in float32 from bfloat16 weights, and how far each way is from float64 on the first rows."""
    rows, width, vocabulary = (16384, 2560, 151936) if device.type == "cuda" else (64, 64, 512)
    x = torch.randn(rows, width, device=device).bfloat16()
    weight = (0.02 * torch.randn(vocabulary, width, device=device)).bfloat16()
    chunk = min(rows, 2048)
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "bfloat16": lambda part: part @ weight.t(),
        "float32": lambda part: part.float() @ weight.float().t(),
    }
    if device.type == "cuda":
        ways["bfloat16 to float32"] = lambda part: torch.mm(part, weight.t(), out_dtype=torch.float32)
    exact = x[:16].double() @ weight.double().t()
    return {
        name: {
            "seconds": round(timed(lambda way=way: [way(part) for part in x.split(chunk)], device), 4),
            "off by": float((way(x[:16]).double() - exact).abs().max()),
        }
        for name, way in ways.items()
    }


def shared(device: torch.device) -> Found:
    """Gradient of keys that 64 siblings share: added up by index_select's backward, and by a sum in float32."""
    siblings, tokens, width = 64, (2048 if device.type == "cuda" else 16), 128
    index = torch.arange(tokens, device=device).repeat(siblings)
    gradient = torch.randn(siblings * tokens, width, device=device).bfloat16()
    exact = gradient.double().view(siblings, tokens, width).sum(0)

    def by_index() -> torch.Tensor:
        return torch.zeros(tokens, width, device=device, dtype=torch.bfloat16).index_add(0, index, gradient)

    def by_sum() -> torch.Tensor:
        return gradient.view(siblings, tokens, width).sum(0, dtype=torch.float32).bfloat16()

    return {
        name: {
            "seconds": round(timed(way, device), 5),
            "relative error": float((way().double() - exact).norm() / exact.norm()),
        }
        for name, way in {"index_add": by_index, "sum in float32": by_sum}.items()
    }


OWN: dict[str, Callable[[torch.device], Found]] = {
    "facts": facts,
    "collectives": collectives,
    "copies": copies,
    "head": head,
    "shared": shared,
}
BLOCKS: dict[str, tuple[float, tuple[str, ...]]] = {
    "facts": (30, ()),
    "collectives": (60, ()),
    "kernels": (90, ("--only", "kernel", "parity", "placement")),
    "copies": (40, ()),
    "fingerprint": (30, ("--only", "fingerprint")),
    "head": (40, ()),
    "shared": (20, ()),
    "speed": (180, ("--model", "4b", "--length", "16384", "--only", "mfu", "memory")),
    "beside": (120, ("--only", "together", "ipc")),
    "storage": (100, ("--only", "checkpoint", "offload")),
}
"""Block -> limit in seconds, and the arguments of `python -m tests.gpu` if its checks are the block."""


def run(block: str, device: str, limit_s: float) -> Found:
    """Run a block in a process of its own, and return its line."""
    arguments = BLOCKS[block][1]
    if device == "cpu" and arguments:
        arguments = arguments[arguments.index("--only") :]
    command = ["tests.gpu", *arguments] if arguments else ["tests.gpu.first", "--block", block]
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", *command, "--device", device],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, complaint = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with an engine that it may have started
            said, complaint = process.communicate()[0], f"killed after {limit_s:.0f} s"
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    found: Any = {line["check"]: line["found"] for line in lines if "check" in line} if arguments else lines[-1:]
    passed = process.returncode == 0
    return {
        "block": block,
        "passed": passed,
        "seconds": round(time.perf_counter() - began, 1),
        "found": found if arguments else (found[0] if found else {}),
        **({} if passed else {"why": complaint[-2000:]}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=list(BLOCKS), nargs="+", default=list(BLOCKS))
    parser.add_argument("--block", choices=list(OWN), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.block:
        print(json.dumps(OWN[given.block](torch.device(given.device))), flush=True)
        return
    began, done = time.perf_counter(), []
    for block in given.only:
        left = ALL_S - (time.perf_counter() - began)
        if left <= 0 or (done and done[-1]["block"] in FIRST and not done[-1]["passed"]):
            break
        done.append(run(block, given.device, min(BLOCKS[block][0], left)))
        print(json.dumps(done[-1]), flush=True)
    line = {
        "benchmark": "tests.gpu.first",
        "command": " ".join(["python", "-m", "tests.gpu.first", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "result": {
            each["block"]: {"passed": each["passed"], "seconds": each["seconds"]} | each["found"] for each in done
        },
    }
    print(json.dumps(line), flush=True)
    sys.exit(0 if len(done) == len(given.only) and all(each["passed"] for each in done) else 1)


if __name__ == "__main__":
    main()
