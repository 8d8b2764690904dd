"""What asynchrony buys: tokens trained per second at `max_staleness` 4 over 0, beside the ideal of perfect overlap.

One core is pinned to the rollout worker and one to the learner. In the synchronous run a step is Tgen (the learner
waits for the batch) plus Ttrain (everything else), so perfect overlap would be (Tgen + Ttrain) / max(Tgen, Ttrain)
times faster.

python benchmarks/overlap.py MODEL_DIR DATA_JSONL [--steps 120] [key=value ...]      prints one JSON line
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

WARM_UP_STEPS = 20
PINS = {"ray::RolloutWorker": [0], "asyncrl.learner": [1]}


def pin(launched: float) -> None:
    """Every process started since: Ray's workers are nobody's children."""
    for process in psutil.process_iter():
        try:
            if process.create_time() < launched:
                continue
            command = " ".join(process.cmdline())
            for mark, cores in PINS.items():
                if mark in command and process.cpu_affinity() != cores:
                    process.cpu_affinity(cores)
        except psutil.NoSuchProcess:
            continue


def run(arguments: argparse.Namespace, max_staleness: int, directory: Path) -> list[dict[str, float]]:
    run_dir = directory / f"staleness{max_staleness}"
    launched = time.time()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "asyncrl.cli", "local", "experiment=quickstart", "eval.every=0"),
            *(f"model.path={arguments.model}", f"data.path={arguments.data}", f"run.dir={run_dir}"),
            *(f"learner.steps={arguments.steps}", f"replay.max_staleness={max_staleness}"),
            *(f"replay.pipeline_depth={min(2, max_staleness)}", *arguments.overrides),
        ],
        stdout=subprocess.DEVNULL,
    )
    while True:
        pin(launched)
        try:
            process.wait(0.5)
            break
        except subprocess.TimeoutExpired:
            continue
    if process.returncode:
        raise SystemExit(f"the run at max_staleness={max_staleness} failed with exit code {process.returncode}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][WARM_UP_STEPS:]


def tokens_per_second(rows: list[dict[str, float]]) -> float:
    tokens = sum(row["perf/trained_tokens_per_s"] * row["time/step"] for row in rows[1:])
    return tokens / (rows[-1]["time"] - rows[0]["time"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    gains, ideals, staleness = [], [], []
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as directory:
            sync = run(arguments, 0, Path(directory))
            overlapped = run(arguments, 4, Path(directory))
        generate = statistics.median(row["time/wait_batch"] for row in sync)
        train = statistics.median(row["time/step"] - row["time/wait_batch"] for row in sync)
        gains.append(tokens_per_second(overlapped) / tokens_per_second(sync))
        ideals.append((generate + train) / max(generate, train))
        staleness.append(statistics.mean(row["staleness/mean"] for row in overlapped))
    gain, ideal = statistics.median(gains), statistics.median(ideals)
    print(
        json.dumps(
            {
                "benchmark": "overlap",
                "speedup": round(gain, 3),
                "ideal": round(ideal, 3),
                "of_ideal": round(statistics.median(g / i for g, i in zip(gains, ideals, strict=True)), 3),
                "mean_staleness": round(statistics.mean(staleness), 2),
                "speedups": [round(g, 3) for g in gains],
                "ideals": [round(i, 3) for i in ideals],
            }
        )
    )


if __name__ == "__main__":
    main()
