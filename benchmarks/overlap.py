"""What does asynchrony gain: how many times more tokens are trained per second at `max_staleness` 4 than at 0?

    python -m benchmarks.overlap [--steps 120] [--repeats 3] [key=value ...]

Runs the quickstart's task with the rollout worker pinned to one core and the learner to another. In the synchronous run
a step takes Tgen (the learner waits for the batch) plus Ttrain (everything else), so perfect overlap would be (Tgen +
Ttrain) / max(Tgen, Ttrain) times faster. For another model and data: `model.path=DIR data.path=FILE`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.parts.answer import answer, parse
from benchmarks.parts.quickstart import SMALL, run_quickstart

CORES = sorted(os.sched_getaffinity(0))
PINS = {"ray::RolloutWorker": CORES[:1], "asyncrl.rollout": CORES[:1], "asyncrl.learner": CORES[-1:]}
"""Text in the command line of a process -> the cores it is pinned to."""


def pin(process: psutil.Process, command: str) -> None:
    for mark, cores in PINS.items():
        if mark in command and process.cpu_affinity() != cores:
            process.cpu_affinity(cores)


def run(given: argparse.Namespace, max_staleness: int, folder: Path) -> list[dict[str, Any]]:
    """Run the quickstart at `max_staleness`. Returns the rows of its metrics without the warm-up steps."""
    settings = (
        *(SMALL if given.smoke else ()),
        *("eval.path=", "eval.every=0", f"learner.steps={given.steps}", f"replay.max_staleness={max_staleness}"),
        *(f"replay.pipeline_depth={min(2, max_staleness)}", *given.overrides),
    )
    return run_quickstart(folder / f"staleness{max_staleness}", settings, pin).rows[given.warm_up :]


def tokens_per_second(rows: list[dict[str, Any]]) -> float:
    tokens = sum(row["perf/trained_tokens_per_s"] * row["time/step"] for row in rows[1:])
    return tokens / (rows[-1]["time"] - rows[0]["time"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--warm-up", type=int, default=20, help="steps that are not counted")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parse(parser, {"steps": 4, "warm_up": 1, "repeats": 1})
    gains, ideals, staleness = [], [], []
    for _ in range(given.repeats):
        with tempfile.TemporaryDirectory() as folder:
            sync = run(given, 0, Path(folder))
            overlapped = run(given, 4, Path(folder))
        generate = statistics.median(row["time/wait_batch"] for row in sync)
        train = statistics.median(row["time/step"] - row["time/wait_batch"] for row in sync)
        gains.append(tokens_per_second(overlapped) / tokens_per_second(sync))
        ideals.append((generate + train) / max(generate, train))
        staleness.append(statistics.mean(row["staleness/mean"] for row in overlapped))
    result = {
        "speedup": round(statistics.median(gains), 3),
        "ideal": round(statistics.median(ideals), 3),
        "of_ideal": round(statistics.median(g / i for g, i in zip(gains, ideals, strict=True)), 3),
        "mean_staleness": round(statistics.mean(staleness), 2),
        "speedups": [round(g, 3) for g in gains],
        "ideals": [round(i, 3) for i in ideals],
    }
    answer("overlap", result, smoke=given.smoke)


if __name__ == "__main__":
    main()
