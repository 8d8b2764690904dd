"""How long does it take from launch until the quickstart's held-out accuracy is 0.95? Wall seconds per seed, with a
cached base model.

    python -m benchmarks.quickstart [--seeds 0,1,2] [key=value ...]

If the base model is not cached yet, the first run trains it, and that time counts. Peak memory is that of the largest
process of each kind.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.parts.answer import answer, parse
from benchmarks.parts.quickstart import ACCURACY, SMALL, run_quickstart

MARKS = {
    "replay": ("asyncrl.replay",),
    "learner": ("asyncrl.learner",),
    "rollout_worker": ("ray::RolloutWorker", "asyncrl.rollout"),
    "reward": ("asyncrl.rewards",),
}
"""Kind of process -> texts of which its command line has one."""
GOAL = 0.95


class PeakMemory:
    """Records the largest resident size, in MiB, of each kind of process."""

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}

    def __call__(self, process: psutil.Process, command: str) -> None:
        for kind, marks in MARKS.items():
            if any(mark in command for mark in marks) and "asyncrl.learner.torchrun" not in command:
                self.peaks[kind] = max(self.peaks.get(kind, 0.0), process.memory_info().rss / 2**20)


def run_seed(seed: int, overrides: list[str], folder: Path) -> dict[str, Any]:
    peak = PeakMemory()
    run = run_quickstart(folder / f"seed{seed}", [f"seed={seed}", *overrides], peak)
    evaluated = run.evaluated()
    reached = next((row for row in evaluated if row[ACCURACY] >= GOAL), None)
    return {
        "seed": seed,
        "seconds_to_95": round(reached["time"] - run.launched, 1) if reached else None,
        "step_of_95": reached["step"] if reached else None,
        "seconds_total": round(run.ended - run.launched, 1),
        "first_step_at_s": round(run.rows[0]["time"] - run.launched, 1),
        "first_accuracy": round(evaluated[0][ACCURACY], 3),
        "final_accuracy": round(evaluated[-1][ACCURACY], 3),
        **{f"{kind}_peak_mb": round(value) for kind, value in sorted(peak.peaks.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parse(parser, {"seeds": "0"})
    overrides = [*(SMALL if given.smoke else ()), *given.overrides]
    with tempfile.TemporaryDirectory() as folder:
        runs = [run_seed(int(seed), overrides, Path(folder)) for seed in given.seeds.split(",")]
    times = [run["seconds_to_95"] for run in runs]
    median = statistics.median(times) if all(value is not None for value in times) else None
    answer("quickstart", {"median_seconds_to_95": median, "runs": runs}, smoke=given.smoke)


if __name__ == "__main__":
    main()
