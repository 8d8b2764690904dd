"""Which correction holds when data is old? Final accuracy of the quickstart task by loss, staleness bound and seed.

    python -m benchmarks.staleness_quality [--cells-file runs/staleness_quality.jsonl] [--losses ppo,tis] [--bounds 0,8]
        [--seeds 0] [--cells N] [key=value ...]

Every finished cell is a line appended to the cells' file; cells that are in it already are skipped, so a stopped
benchmark goes on where it was. One seed of every cell comes before the second seed of any, and within a seed the bounds
that tell most come first. The answer is what the file then holds: mean, lowest and highest accuracy in percent. With
--cells 0 nothing is run.

Rollouts are let run as far ahead as the bound allows (`pipeline_depth = max_staleness`), so data really is old: the
mean staleness that was trained stands beside it. Old data hurts in proportion to the learning rate: with the
quickstart's own an uncorrected run is merely bad; `learner.lr=1e-3` (in a file of its own) shows what breaks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.parts.answer import answer, parse
from benchmarks.parts.quickstart import ACCURACY, SMALL, run_quickstart

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
SMOKE = {"losses": "dppo_tv", "bounds": [1], "seeds": [0], "cells_file": None}

Cell = tuple[str, int, int]
"""Loss, bound, seed."""


def cells(losses: Sequence[str], bounds: Sequence[int], seeds: Sequence[int]) -> Iterator[Cell]:
    """In the order in which they are run."""
    return ((loss, bound, seed) for seed in seeds for bound in bounds for loss in losses)


def run_cell(cell: Cell, overrides: Sequence[str]) -> dict[str, Any]:
    loss, bound, seed = cell
    settings = (f"seed={seed}", f"loss={loss}", *COMMON, *LOSSES[loss])
    depth = (f"replay.max_staleness={bound}", f"replay.pipeline_depth={bound}")
    with tempfile.TemporaryDirectory() as folder:
        run = run_quickstart(Path(folder) / "run", [*settings, *depth, *overrides])
    accuracies = [row[ACCURACY] for row in run.evaluated()]
    return {
        "loss": loss,
        "max_staleness": bound,
        "seed": seed,
        "overrides": list(overrides),
        "final": accuracies[-1],
        "best": max(accuracies),
        "staleness": round(statistics.mean(row["staleness/mean"] for row in run.rows[len(run.rows) // 4 :]), 2),
        "wall_s": round(run.ended - run.launched, 1),
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


def table(results: dict[Cell, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Loss -> bound -> final accuracy in %, mean over the seeds (lowest and highest); staleness, median wall time."""
    found: dict[str, dict[str, str]] = {}
    for loss in sorted({loss for loss, _, _ in results}, key=list(LOSSES).index):
        mine = [row for (name, _, _), row in results.items() if name == loss]
        bounds = sorted({row["max_staleness"] for row in mine})
        per_bound = {bound: [row for row in mine if row["max_staleness"] == bound] for bound in bounds}
        found[loss] = {str(bound): in_percent([row["final"] for row in rows]) for bound, rows in per_bound.items()}
        ages = (f"{statistics.mean(row['staleness'] for row in rows):.1f}" for rows in per_bound.values())
        found[loss]["mean staleness of each"] = ", ".join(ages)
        found[loss]["a run took"] = f"{statistics.median(row['wall_s'] for row in mine):.0f} s"
    return found


def in_percent(accuracies: Sequence[float]) -> str:
    mean = f"{100 * statistics.mean(accuracies):.1f}"
    if min(accuracies) == max(accuracies):
        return mean
    return f"{mean} ({100 * min(accuracies):.1f}–{100 * max(accuracies):.1f})"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells-file", type=Path, default=Path("runs/staleness_quality.jsonl"))
    parser.add_argument("--losses", default=",".join(LOSSES))
    parser.add_argument("--bounds", type=numbers, default=list(BOUNDS))
    parser.add_argument("--seeds", type=numbers, default=list(SEEDS))
    parser.add_argument("--cells", type=int, default=None, help="run at most so many")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parse(parser, SMOKE)
    with tempfile.TemporaryDirectory() as scratch:
        file = given.cells_file or Path(scratch) / "cells.jsonl"
        done = fill(file, given, [*(SMALL if given.smoke else ()), *given.overrides])
    answer("staleness_quality", {"cells": len(done), "accuracy": table(done)}, smoke=given.smoke)


def fill(file: Path, given: argparse.Namespace, overrides: list[str]) -> dict[Cell, dict[str, Any]]:
    """All finished cells, with those that were open and are run now."""
    file.parent.mkdir(parents=True, exist_ok=True)
    done = read_results(file, overrides)
    open_cells = [cell for cell in cells(given.losses.split(","), given.bounds, given.seeds) if cell not in done]
    for cell in open_cells[: given.cells]:
        done[cell] = run_cell(cell, overrides)
        append_result(file, done[cell])
        print(done[cell], file=sys.stderr, flush=True)
    return done


if __name__ == "__main__":
    main()
