"""Which correction holds when data is old? Final accuracy of the quickstart task by loss, staleness bound and seed.

    python benchmarks/staleness_quality.py RESULTS.jsonl [--losses ppo,tis] [--bounds 0,8] [--seeds 0] [--cells N]
        [key=value ...]

Every finished cell is one line appended to RESULTS.jsonl; cells that are in it already are skipped, so a stopped
benchmark goes on where it was. One seed of every cell comes before the second seed of any, and within a seed the bounds
that tell most come first. Prints a Markdown table of what the file holds; with --cells 0 nothing else.

Rollouts are let run as far ahead as the bound allows (`pipeline_depth = max_staleness`), so data really is old: the
mean staleness that was trained stands in the table. Old data hurts in proportion to the learning rate: with the
quickstart's own an uncorrected run is merely bad; `learner.lr=1e-3` (in a file of its own) shows what breaks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LOSSES: dict[str, tuple[str, ...]] = {
    "no_correction": (),
    "ppo": (),
    # With one update per batch its clip is idle; the cap on the behavior weight (AReaL's) is what is left to compare.
    "decoupled_ppo": ("loss.weight_high=5.0",),
    "tis": (),
    "cispo": (),
    "dppo_tv": (),
    # Its statistic is over all tokens of a micro-batch: the whole batch in one, which makes its learner faster again.
    "m2po_paper": ("learner.max_tokens_per_microbatch=8192",),
}
"""Loss -> settings that it needs beside its preset."""
COMMON = ("rollout=process", "learner.max_tokens_per_microbatch=192")
"""Settings of every cell. The small micro-batches make the learner slower than the rollouts: a faster one trains data
as soon as it is there, long before it reaches the bound."""
BOUNDS = (8, 0, 16, 4, 2, 1)
SEEDS = (0, 1, 2)
ACCURACY = "eval/heldout/accuracy"

Cell = tuple[str, int, int]
"""Loss, bound, seed."""


def cells(losses: Sequence[str], bounds: Sequence[int], seeds: Sequence[int]) -> Iterator[Cell]:
    """In the order in which they are run."""
    return ((loss, bound, seed) for seed in seeds for bound in bounds for loss in losses)


def run_cell(cell: Cell, overrides: Sequence[str]) -> dict[str, Any]:
    loss, bound, seed = cell
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        settings = (f"seed={seed}", f"run.dir={run_dir}", f"loss={loss}", *COMMON, *LOSSES[loss])
        depth = (f"replay.max_staleness={bound}", f"replay.pipeline_depth={bound}")
        launched = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "asyncrl.quickstart", *settings, *depth, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        wall = time.monotonic() - launched
        if done.returncode:
            said = done.stdout[-2000:]
            raise SystemExit(f"loss={loss} max_staleness={bound} seed={seed} ended with {done.returncode}:\n{said}")
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    accuracies = [row[ACCURACY] for row in rows if ACCURACY in row]
    return {
        "loss": loss,
        "max_staleness": bound,
        "seed": seed,
        "overrides": list(overrides),
        "final": accuracies[-1],
        "best": max(accuracies),
        "staleness": round(statistics.mean(row["staleness/mean"] for row in rows[len(rows) // 4 :]), 2),
        "wall_s": round(wall, 1),
    }


def read_results(path: Path, overrides: Sequence[str]) -> dict[Cell, dict[str, Any]]:
    """The finished cells that were run with the same extra settings."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.strip()]
    wanted = list(overrides)
    return {(row["loss"], row["max_staleness"], row["seed"]): row for row in rows if row["overrides"] == wanted}


def append_result(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def table(results: dict[Cell, dict[str, Any]]) -> str:
    """Final accuracy in %, mean over the seeds (lowest and highest), by loss and bound; staleness and wall time."""
    bounds = sorted({bound for _, bound, _ in results})
    lines = ["| loss | " + " | ".join(f"max_staleness {bound}" for bound in bounds) + " | wall time |"]
    lines.append("|---" * (len(bounds) + 2) + "|")
    for loss in LOSSES:
        of_loss = [row for (name, _, _), row in results.items() if name == loss]
        if not of_loss:
            continue
        per_bound = ([row["final"] for row in of_loss if row["max_staleness"] == bound] for bound in bounds)
        wall = sum(row["wall_s"] for row in of_loss)
        lines.append(f"| `{loss}` | " + " | ".join(map(in_percent, per_bound)) + f" | {wall / 60:.1f} min |")
    staleness = (
        statistics.mean(row["staleness"] for (_, b, _), row in results.items() if b == bound) for bound in bounds
    )
    total = sum(row["wall_s"] for row in results.values())
    lines.append("| mean staleness trained | " + " | ".join(f"{age:.1f}" for age in staleness) + " | |")
    lines.append(f"\n{len(results)} cells, {total / 60:.0f} min of wall time, one after the other.")
    return "\n".join(lines)


def in_percent(accuracies: Sequence[float]) -> str:
    if not accuracies:
        return ""
    mean = 100 * statistics.mean(accuracies)
    if len(accuracies) == 1:
        return f"{mean:.1f}"
    return f"{mean:.1f} ({100 * min(accuracies):.1f}–{100 * max(accuracies):.1f})"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--losses", default=",".join(LOSSES))
    parser.add_argument("--bounds", type=numbers, default=list(BOUNDS))
    parser.add_argument("--seeds", type=numbers, default=list(SEEDS))
    parser.add_argument("--cells", type=int, default=None, help="run at most so many")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    done = read_results(arguments.results, arguments.overrides)
    open_cells = [c for c in cells(arguments.losses.split(","), arguments.bounds, arguments.seeds) if c not in done]
    for cell in open_cells[: arguments.cells]:
        done[cell] = run_cell(cell, arguments.overrides)
        append_result(arguments.results, done[cell])
        print(done[cell], file=sys.stderr, flush=True)
    print(table(done) if done else "no cell is finished")


if __name__ == "__main__":
    main()
