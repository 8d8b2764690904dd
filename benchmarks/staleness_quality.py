"""Which off-policy correction holds when data is old? Final accuracy (for `reasoning_gym`: mean reward) by loss, with
and without score centering, by staleness, learning rate and seed.

    python -m benchmarks.staleness_quality [--cells-file FILE] [--losses ppo,tis] [--centering off,on] [--ages 0,8]
        [--rates 3e-4,1e-3] [--seeds 0] [--task reverse|two_turns|reasoning_gym] [--live] [--cells N] [key=value ...]

Every cell is a run from the same base model, in one process. Engine, environment, rewards, advantages, loss and learner
are those of a run; a delay line of weights between them makes every token exactly as many versions old as the cell
says, after a warm-up of as many steps (`parts/held_age.py`). With --live a cell is a run with processes of its own, as
users start it, and its staleness is bounded instead: rollouts may run as far ahead as the bound allows, and a small
micro-batch makes the learner the slower side. Live cells are spot checks of the others.

Every finished cell is appended as a line to the cells' file. Cells that are in the file already are skipped, so that a
stopped benchmark goes on where it was. The first seed of every cell comes before the second seed of any, and within a
seed the most informative cells come first. The answer is made from what the file then holds: mean, lowest and highest
accuracy in percent, and the number of seeds where it is not three. With --cells 0 nothing is run.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.parts.answer import answer, commit, parse
from benchmarks.parts.cells import LOSSES, TASKS, UNCENTERED, Cell, CellsFile, in_percent, run_cell
from benchmarks.parts.quickstart import SMALL, run_quickstart

AGES = (8, 16, 32, 0, 4)
RATES = (1e-3, 3e-4)
"""Learning rates: more than three times the quickstart's, and the quickstart's."""
SEEDS = (0, 1, 2)
EVALUATED = ("eval.every=25",)
LIVE = ("rollout=process", "learner.max_tokens_per_microbatch=192")
"""Settings of live cells. The small micro-batches make the learner slower than the rollouts: a faster one would train
data as soon as it arrives, long before it reaches the staleness bound."""
SMOKE = {"losses": ["cispo"], "ages": [1], "rates": [3e-4], "seeds": [0], "centering": ["on"], "cells_file": None}

Cells = dict[Cell, dict[str, Any]]


def cells(given: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells in the order in which they are run."""
    for seed, lr, age, loss, centering in itertools.product(
        given.seeds, given.rates, given.ages, given.losses, given.centering
    ):
        if centering == "off" or loss not in UNCENTERED:
            yield Cell(
                task=given.task,
                loss=loss,
                centering=centering == "on",
                staleness=age,
                lr=lr,
                seed=seed,
                live=given.live,
            )


def run_live(cell: Cell, overrides: Sequence[str]) -> dict[str, Any]:
    """Run a live cell. Returns its row."""
    depth = (f"replay.max_staleness={cell.staleness}", f"replay.pipeline_depth={cell.staleness}")
    measured = TASKS[cell.task].measured
    with tempfile.TemporaryDirectory() as folder:
        run = run_quickstart(Path(folder) / "run", [*cell.settings(), *LIVE, *depth, *overrides])
    later = run.rows[len(run.rows) // 2 :]
    return {
        **asdict(cell),
        "overrides": list(overrides),
        "commit": commit(),
        "final": round(run.evaluated(measured)[-1][measured], 4),
        "age": round(statistics.mean(row["staleness/mean"] for row in later), 2),
        "wall_s": round(run.ended - run.launched, 1),
    }


def result(done: Cells, more: Mapping[str, Cells]) -> dict[str, Any]:
    """Return the answer: a table per task and learning rate, live cells beside cells held at their bound, the cost, and
    the same for the cells of the file that were run with `more` settings."""
    held = {cell: row for cell, row in done.items() if not cell.live}
    live = {cell: row for cell, row in done.items() if cell.live}
    said: dict[str, Any] = {"cells": len(held), "live cells": len(live)}
    timed = [row["cpu_s"] for row in held.values() if "cpu_s" in row]
    if timed:
        said["CPU seconds of a cell, median"] = round(statistics.median(timed), 1)
    said["commits of the cells"] = sorted({row["commit"] for row in done.values()})
    for task, lr in itertools.product(TASKS, sorted({cell.lr for cell in held})):
        rows = table({cell: row for cell, row in held.items() if cell.task == task and cell.lr == lr})
        if rows:
            said[f"accuracy, {task}, learning rate {lr:g}, by staleness"] = rows
    if live:
        said["live runs, accuracy and mean staleness, beside data held at their bound"] = spot_checks(live, held)
    for settings, others in sorted(more.items()):
        said |= {f"{settings}: {name}": rows for name, rows in result(others, {}).items() if isinstance(rows, dict)}
    return said


def table(found: Cells) -> dict[str, dict[str, str]]:
    """Return loss -> staleness -> accuracies in %."""
    ages = sorted({cell.staleness for cell in found})
    rows: dict[str, dict[str, str]] = {}
    for loss, centering in itertools.product(LOSSES, (False, True)):
        mine = {cell: row for cell, row in found.items() if (cell.loss, cell.centering) == (loss, centering)}
        if mine:
            rows[loss + " + centering" * centering] = {
                str(age): in_percent([row for cell, row in mine.items() if cell.staleness == age], len(SEEDS))
                for age in ages
            }
    return rows


def spot_checks(live: Cells, held: Cells) -> dict[str, dict[str, str]]:
    """Return what identifies a cell except its seed -> accuracy of live and of held cells."""
    rows: dict[str, dict[str, str]] = {}
    kinds = dict.fromkeys((cell.task, cell.loss, cell.centering, cell.staleness, cell.lr) for cell in live)
    for kind in kinds:

        def of(cells: Cells, kind: tuple[Any, ...] = kind) -> list[dict[str, Any]]:
            return [row for c, row in cells.items() if (c.task, c.loss, c.centering, c.staleness, c.lr) == kind]

        task, loss, centering, staleness, lr = kind
        ages = ", ".join(f"{row['age']}" for row in of(live))
        rows[f"{task}, {loss}{' + centering' * centering}, staleness {staleness}, {lr:g}"] = {
            "live": in_percent(of(live), len(SEEDS)),
            "mean staleness of each": ages,
            "held": in_percent(of(held), len(SEEDS)),
        }
    return rows


def words(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells-file", type=Path, default=Path("runs/staleness_quality.jsonl"))
    parser.add_argument("--task", choices=list(TASKS), default="reverse")
    parser.add_argument("--losses", type=words, default=list(LOSSES))
    parser.add_argument("--centering", type=words, default=["off", "on"])
    parser.add_argument("--ages", type=numbers, default=list(AGES))
    parser.add_argument("--rates", type=rates, default=list(RATES))
    parser.add_argument("--seeds", type=numbers, default=list(SEEDS))
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--cells", type=int, default=None, help="run at most so many")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parse(parser, SMOKE)
    with tempfile.TemporaryDirectory() as scratch:
        path = given.cells_file or Path(scratch) / "cells.jsonl"
        overrides = [*(SMALL if given.smoke else EVALUATED), *given.overrides]
        file = CellsFile(path, overrides)
        said = result(fill(file, given, overrides), file.read_more())
    answer("staleness_quality", said, smoke=given.smoke)


def fill(file: CellsFile, given: argparse.Namespace, overrides: list[str]) -> Cells:
    """Run the cells that are not in the file yet. Returns all finished cells."""
    done = file.read()
    for cell in [cell for cell in cells(given) if cell not in done][: given.cells]:
        row = run_live(cell, overrides) if cell.live else run_cell(cell, overrides)
        file.append(row)
        done[cell] = row
        print(row, file=sys.stderr, flush=True)
    return done


if __name__ == "__main__":
    main()
