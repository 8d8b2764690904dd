"""What does `telemetry.trace=true` cost in a rollout worker, where most spans are written?

    python -m benchmarks.trace [--pairs 40] [--groups 64]

The built-in engine and the code of a worker's episodes generate groups of 8 of the quickstart's size (149 k parameters,
10 tokens: groups end so soon that more spans are written per second of computing than in any other run). Blocks of
`groups` groups alternate, one of each pair with spans. Medians over the pairs:

    overhead_percent         processor time of a block with spans over that of the block without, minus 1
    quartiles_percent        quartiles of that overhead over the pairs
    spans_per_cpu_s          spans written per second of processor time
    span_us                  processor time of one span, measured alone
    off_us                   processor time of the same statement when nothing is traced
    of_spans_percent         the sum of the spans, `spans_per_cpu_s` times the difference of the two: differs from 0
                             even on a busy machine, but leaves out the cost of lost cache contents
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np
import torch

from asyncrl import spans
from asyncrl.engines.hf.engine import TransformersEngine
from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.rewards.score import RewardScore
from asyncrl.rollout.groups.episode import EpisodeRunner, GroupShape, order_name, traced
from asyncrl.telemetry.trace import records
from asyncrl.types import Assignment, Prompt, SamplingParams
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.model import tiny_model

GROUP, SLOTS = 8, 32
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=10, stop_token_ids=())
PROMPT = Prompt(index=0, epoch=0, row=0, token_ids=np.arange(6, dtype=np.int32), text="abcde>")


async def score(texts: list[str], row: dict[str, Any], **_: Any) -> list[RewardScore]:
    return [RewardScore(value=float(len(text) % 2)) for text in texts]


async def make(runner: EpisodeRunner, order: Assignment, slots: asyncio.Semaphore) -> None:
    async with slots:
        name = traced(order_name(order))
        with spans.span("group", **name, row=0):
            await runner.run_group(order, PROMPT, shape=SHAPE, sampling=SAMPLING, worker="w")
            with spans.span("insert", **name):
                await asyncio.sleep(0)


SHAPE = GroupShape(size=GROUP, fewest=GROUP, tries=1)


async def block(runner: EpisodeRunner, numbers: Any, groups: int) -> float:
    """Generate `groups` groups. Returns the processor seconds."""
    slots, started = asyncio.Semaphore(SLOTS), time.process_time()
    orders = [
        Assignment(group_id=next(numbers), prompt_index=0, seed=1, attempt=0, policy_version=0) for _ in range(groups)
    ]
    await asyncio.gather(*(make(runner, order, slots) for order in orders))
    return time.process_time() - started


async def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    engine = TransformersEngine(ModelRunner(tiny_model(), torch.device("cpu"), GROUP * SLOTS))
    runner = EpisodeRunner(
        engine=engine,
        environment=SingleTurn(),
        decode=lambda ids, special=False: ["x" for _ in ids],
        encode=lambda text: np.zeros(1, np.int32),
        score=score,
    )
    numbers = itertools.count()
    await block(runner, numbers, given.groups)
    ratios, traced_s = [], 0.0
    for pair in range(given.pairs):
        seconds = {}
        for on in (pair % 2 == 0, pair % 2 == 1):
            if on:
                spans.begin(folder, "worker")
            seconds[on] = await block(runner, numbers, given.groups)
            spans.end()
        ratios.append(seconds[True] / seconds[False] - 1)
        traced_s += seconds[True]
    await engine.close()
    written = sum(1 for path in folder.iterdir() for _ in records(path))
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "overhead_percent": round(100 * statistics.median(ratios), 2),
        "quartiles_percent": [round(100 * quartiles[place], 2) for place in (0, 2)],
        "spans_per_cpu_s": round(written / traced_s),
    }


def each(folder: Path, times: int, on: bool) -> float:
    """Return the microseconds of processor time of one span, with tracing `on` or off."""
    if on:
        spans.begin(folder, "alone")
    started = time.process_time()
    for number in range(times):
        with spans.span("generate", "groups", group=number, attempt=0):
            pass
    seconds = time.process_time() - started
    spans.end()
    return round(seconds / times * 1e6, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--groups", type=int, default=64)
    given = parse(parser, {"pairs": 1, "groups": 4})
    with tempfile.TemporaryDirectory() as folder:
        spans.FILES_KEPT = 2 * given.pairs  # keep all files, since all spans are counted
        result = asyncio.run(measure(given, Path(folder) / "a"))
        times = 1000 if given.smoke else 20_000
        result |= {"span_us": each(Path(folder) / "b", times, True), "off_us": each(Path(folder) / "c", times, False)}
        dearer_us = result["span_us"] - result["off_us"]
        result["of_spans_percent"] = round(1e-4 * result["spans_per_cpu_s"] * dearer_us, 2)
    answer("trace", result, smoke=given.smoke)


if __name__ == "__main__":
    main()
