"""Groups to send, child processes, and measurements of CPU time and memory, for the benchmarks of the replay."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from asyncrl.types import NO_VERSION, Assignment, Trajectory, TrajectoryGroup

GROUP_SIZE = 8
spawn = multiprocessing.get_context("spawn")
Row = dict[str, float]


@dataclass(frozen=True)
class Size:
    """Size of a group: tokens of each of its trajectories, and bytes of the extras of all of them together."""

    tokens: int
    extras: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of a group at 9 bytes per token: the content of the arrays that every contender has to carry."""
        return GROUP_SIZE * self.tokens * 9 + self.extras


def make_trajectory(size: Size) -> Trajectory:
    tokens, image = size.tokens, np.ones(size.extras // GROUP_SIZE, np.uint8)
    mask = np.arange(tokens) >= max(1, tokens // 4)
    return Trajectory(
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        policy_versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
        reward=1.0,
        extras={"image": image} if len(image) else {},
    )


def make_group(trajectories: tuple[Trajectory, ...], order: Assignment | None = None) -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=order.group_id if order else 0,
        prompt_index=order.prompt_index if order else 0,
        attempt=order.attempt if order else 0,
        worker="producer",
        trajectories=trajectories,
    )


def make_trajectories(size: Size) -> tuple[Trajectory, ...]:
    """Return eight distinct trajectories. Pickle would carry a repeated one only once."""
    return tuple(make_trajectory(size) for _ in range(GROUP_SIZE))


def rates(groups: float, elapsed: float, size: Size) -> Row:
    return {"trajectories_per_s": groups * GROUP_SIZE / elapsed, "mb_per_s": groups * size.nbytes / elapsed / 1e6}


def timed(take: Callable[[], None], seconds: float, size: Size, warm: int) -> tuple[Row, int, float]:
    """Call `take` for `seconds`, after `warm` calls. Returns (rates, groups, CPU seconds of this process and its
    children)."""
    for _ in range(warm):
        take()
    start, groups, cpu = time.perf_counter(), 0, family_cpu_seconds()
    while time.perf_counter() - start < seconds:
        take()
        groups += 1
    return rates(groups, time.perf_counter() - start, size), groups, family_cpu_seconds() - cpu


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
    """Return the CPU seconds of this process and of the children that it started."""
    return sum(cpu_seconds(pid) for pid in (os.getpid(), *(child.pid for child in multiprocessing.active_children())))


def rss_mb(process: BaseProcess) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024
