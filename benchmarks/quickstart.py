"""How long from launch until the quickstart's held-out accuracy is 0.95? Wall seconds per seed, warm-up cached.

python benchmarks/quickstart.py [--seeds 0,1,2] [key=value ...]      prints one JSON line
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

ACCURACY = "eval/heldout/accuracy"


def peak_memory(launched: float, peaks: dict[str, float]) -> None:
    """Keep the largest resident size, in MB, of each kind of process started since (Ray's are nobody's children)."""
    for process in psutil.process_iter():
        try:
            if process.create_time() < launched:
                continue
            command = " ".join(process.cmdline())
            resident = process.memory_info().rss / 2**20
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        for kind, mark in (
            ("replay", "asyncrl.replay"),
            ("learner", "asyncrl.learner"),
            ("rollout_worker", "ray::RolloutWorker"),
            ("reward", "asyncrl.rewards"),
        ):
            if mark in command and "torch.distributed.run" not in command:
                peaks[kind] = max(peaks.get(kind, 0.0), resident)


def run_seed(seed: int, overrides: list[str], directory: Path) -> dict[str, object]:
    launched = time.time()
    run_dir = directory / f"seed{seed}"
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncrl.quickstart", f"seed={seed}", f"run.dir={run_dir}", *overrides],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    peaks: dict[str, float] = {}
    while process.poll() is None:
        peak_memory(launched, peaks)
        time.sleep(0.5)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if ACCURACY in row]
    reached = next((row for row in evaluated if row[ACCURACY] >= 0.95), None)
    return {
        "seed": seed,
        "exit": process.returncode,
        "seconds_to_95": round(reached["time"] - launched, 1) if reached else None,
        "step_of_95": reached["step"] if reached else None,
        "seconds_total": round(time.time() - launched, 1),
        "first_step_at_s": round(rows[0]["time"] - launched, 1),
        "first_accuracy": evaluated[0][ACCURACY],
        "final_accuracy": evaluated[-1][ACCURACY],
        "peak_rss_mb": {kind: round(value) for kind, value in sorted(peaks.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("overrides", nargs="*", help="key=value settings passed on")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    with tempfile.TemporaryDirectory() as directory:
        results = [run_seed(seed, arguments.overrides, Path(directory)) for seed in seeds]
    times = [result["seconds_to_95"] for result in results]
    median = statistics.median(times) if all(value is not None for value in times) else None
    print(json.dumps({"benchmark": "quickstart", "median_seconds_to_95": median, "runs": results}))


if __name__ == "__main__":
    main()
