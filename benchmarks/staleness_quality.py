"""Does the correction hold when data is old? Final accuracy of the quickstart task by loss and staleness bound.

Rollouts are let run as far ahead as the bound allows (`pipeline_depth = max_staleness`), so data really is old: the
mean staleness that was trained is reported beside each accuracy.

The learning rate is three times the quickstart's, for all cells alike: old data hurts in proportion to it, and at the
quickstart's own rate an uncorrected run is merely bad. Another rate: learner.lr=3e-4.

python benchmarks/staleness_quality.py [--cells no_correction:16,dppo_tv:4] [--seeds 0,1,2] [key=value ...]
prints one JSON line
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RATE = "learner.lr=1e-3"
ACCURACY = "eval/heldout/accuracy"


def run_cell(loss: str, bound: int, seed: int, overrides: list[str], directory: Path) -> dict[str, float]:
    run_dir = directory / f"{loss}-{bound}-{seed}"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "asyncrl.quickstart", f"seed={seed}", f"run.dir={run_dir}", f"loss={loss}"),
            *(f"replay.max_staleness={bound}", f"replay.pipeline_depth={bound}", RATE, *overrides),
        ],
        stdout=subprocess.DEVNULL,
    )
    if done.returncode:
        raise SystemExit(f"loss={loss} max_staleness={bound} seed={seed} failed with exit code {done.returncode}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    accuracies = [row[ACCURACY] for row in rows if ACCURACY in row]
    return {
        "final": accuracies[-1],
        "best": max(accuracies),
        "staleness": statistics.mean(row["staleness/mean"] for row in rows[len(rows) // 4 :]),
        "seconds": rows[-1]["time"] - rows[0]["time"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", default="no_correction:16,dppo_tv:4", metavar="LOSS:BOUND,...")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    table, seeds = [], [int(seed) for seed in arguments.seeds.split(",")]
    for cell in arguments.cells.split(","):
        loss, bound = cell.split(":")
        with tempfile.TemporaryDirectory() as directory:
            runs = [run_cell(loss, int(bound), seed, arguments.overrides, Path(directory)) for seed in seeds]
        row = {"loss": loss, "max_staleness": int(bound), "seeds": seeds}
        for key in ("final", "best", "staleness", "seconds"):
            row[key] = [round(run[key], 3) for run in runs]
        table.append(row)
        print(row, file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "staleness_quality", "rows": table}))


if __name__ == "__main__":
    main()
