"""What does a call of a trivial reward cost beyond the function itself?

    python -m benchmarks.rewards [--calls 3000] [--tokens 1000] [--sandboxes 20]

Milliseconds per call, including the reward function (a length) and its process:

    alone       one completion, one call after another: a round trip through two pipes
    busy        the same with 64 calls under way, as in a worker
    group       a group of 16 with the token ids of its completions, 64 calls under way
    processor   processor time of both processes per call of `busy`
    program     one program that prints a line, run in the sandbox at the strongest level that this machine has
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from asyncrl.rewards.pool import RewardPool
from asyncrl.sandbox.level import Level
from asyncrl.sandbox.running import run, unavailable
from asyncrl.types import Completion
from asyncrl.utils.process_tree import descendants
from benchmarks.parts.answer import answer, parse

UNDER_WAY = 64
GROUP = 16
ROW = {"prompt": "p", "answer": "4"}
REWARD = "benchmarks.parts.trivial_reward:length"
TICKS = os.sysconf("SC_CLK_TCK")


def processor_s() -> float:
    """Return the processor seconds of this process and its descendants."""
    total = 0.0
    for pid in (os.getpid(), *(process.pid for process in descendants(os.getpid()))):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


async def alone(pool: RewardPool, calls: int) -> float:
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        await pool.score(["four"], ROW)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


async def busy(pool: RewardPool, calls: int, texts: list[str], sampled: Sequence[Completion] | None) -> float:
    left = iter(range(calls))

    async def one_after_the_other() -> None:
        for _ in left:
            await pool.score(texts, ROW, sampled=sampled)

    started = time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(UNDER_WAY)))
    return (time.perf_counter() - started) / calls * 1e3


def completion(tokens: int) -> Completion:
    ids = np.arange(tokens, dtype=np.int32)
    return Completion(token_ids=ids, logprobs=ids.astype(np.float32), policy_versions=ids, finish_reason="stop")


async def measure(calls: int, tokens: int) -> dict[str, float]:
    async with RewardPool(REWARD, workers=1, timeout_s=60.0) as pool:
        await alone(pool, max(calls // 10, 1))
        row = {"alone": await alone(pool, calls)}
        before = processor_s()
        row["busy"] = await busy(pool, calls, ["four"], None)
        row["processor"] = (processor_s() - before) / calls * 1e3
        row["group"] = await busy(pool, calls, ["four"] * GROUP, [completion(tokens)] * GROUP)
    return row


def sandboxed(programs: int) -> tuple[str, float]:
    level = Level.RLIMITS if unavailable(Level.NAMESPACES) else Level.NAMESPACES
    times = []
    for _ in range(programs):
        started = time.perf_counter()
        run("print(4)", level=level)
        times.append(time.perf_counter() - started)
    return level.value, statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--sandboxes", type=int, default=20)
    options = parse(parser, {"calls": 20, "tokens": 10, "sandboxes": 1})
    row = asyncio.run(measure(options.calls, options.tokens))
    level, program_ms = sandboxed(options.sandboxes)
    times = {name: round(value, 3) for name, value in row.items()} | {"program": round(program_ms, 1)}
    answer("rewards", {"calls": options.calls, "level": level, "ms": times}, smoke=options.smoke)


if __name__ == "__main__":
    main()
