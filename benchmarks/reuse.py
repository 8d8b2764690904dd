"""When rollouts are the bottleneck, what does training each group k times gain: how many tokens are generated until the
held-out accuracy is 0.95?

    python -m benchmarks.reuse [--cells-file FILE] [--losses dppo_tv] [--uses 2,1,4] [--age 1] [--lr 3e-4] [--seeds 0]
        [--task reverse|two_turns] [--cells N] [key=value ...]

Runs `replay.max_times_sampled=k` in one process, as `benchmarks.staleness_quality` does. Before each step, 1 / k of the
groups that it trains are generated, by weights that are `--age` versions old; the replay's own order decides which
groups are used again. All runs have the same number of steps, so k = 2 generates half as many tokens in total, and each
group is older when it is used again. As there, a stopped benchmark goes on from its cells' file.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.parts.answer import answer, parse
from benchmarks.parts.cells import LOSSES, TASKS, Cell, CellsFile, in_percent, run_cell
from benchmarks.parts.quickstart import SMALL

SEEDS = (0, 1, 2)
GOAL = 0.95
EVALUATED = ("eval.every=4",)
SMOKE = {"uses": [2], "seeds": [0], "cells_file": None}

Cells = dict[Cell, dict[str, Any]]


def cells(given: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells in the order in which they are run."""
    for seed, loss, uses in itertools.product(given.seeds, given.losses, given.uses):
        yield Cell(task=given.task, loss=loss, staleness=given.age, lr=given.lr, reuse=uses, seed=seed)


def tokens_to_goal(row: dict[str, Any]) -> int | None:
    """Return the tokens generated for training until the accuracy first was `GOAL`; None if it never was."""
    return next((tokens for _, accuracy, tokens in row.get("curve", []) if accuracy >= GOAL), None)


def result(done: Cells, more: Mapping[str, Cells]) -> dict[str, Any]:
    """Return a table by k for each task, loss, age and learning rate: tokens to the goal, also as a share of those of
    k = 1 with the same seed. Then the same tables for the cells of the file that were run with `more` settings."""
    said: dict[str, Any] = {
        "cells": len(done),
        "commits of the cells": sorted({row["commit"] for row in done.values()}),
    }
    kinds = dict.fromkeys((cell.task, cell.loss, cell.staleness, cell.lr) for cell in done)
    for kind in kinds:
        mine = {c: row for c, row in done.items() if (c.task, c.loss, c.staleness, c.lr) == kind}
        task, loss, age, lr = kind
        name = f"{task}, {loss}, made by weights {age} old, learning rate {lr:g}, by k"
        said[name] = {str(uses): of_uses(mine, uses) for uses in sorted({cell.reuse for cell in mine})}
    for settings, others in sorted(more.items()):
        said |= {f"{settings}: {name}": rows for name, rows in result(others, {}).items() if isinstance(rows, dict)}
    return said


def of_uses(mine: Cells, uses: int) -> dict[str, Any]:
    rows = {cell.seed: row for cell, row in mine.items() if cell.reuse == uses}
    once = {cell.seed: tokens_to_goal(row) for cell, row in mine.items() if cell.reuse == 1}
    reached = {seed: tokens_to_goal(row) for seed, row in rows.items()}
    shares = [tokens / base for seed, tokens in reached.items() if tokens and (base := once.get(seed))]
    return {
        "tokens to 0.95, by seed": [tokens or "not reached" for _, tokens in sorted(reached.items())],
        "share of those of k = 1": f"{statistics.mean(shares):.2f}" if shares else "",
        "final accuracy": in_percent(list(rows.values()), len(SEEDS)),
        "tokens in all": round(statistics.mean(row["tokens"] for row in rows.values() if "tokens" in row)),
        "mean staleness": round(statistics.mean(row["age"] for row in rows.values() if "age" in row), 1),
    }


def words(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells-file", type=Path, default=Path("runs/reuse.jsonl"))
    parser.add_argument("--task", choices=list(TASKS), default="reverse")
    parser.add_argument("--losses", type=words, default=["dppo_tv"], help=f"of {', '.join(LOSSES)}")
    parser.add_argument("--uses", type=numbers, default=[2, 1, 4])
    parser.add_argument("--age", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seeds", type=numbers, default=list(SEEDS))
    parser.add_argument("--cells", type=int, default=None, help="run at most so many")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parse(parser, SMOKE)
    with tempfile.TemporaryDirectory() as scratch:
        overrides = [*(SMALL if given.smoke else EVALUATED), *given.overrides]
        file = CellsFile(given.cells_file or Path(scratch) / "cells.jsonl", overrides)
        done = file.read()
        for cell in [cell for cell in cells(given) if cell not in done][: given.cells]:
            done[cell] = run_cell(cell, overrides)
            file.append(done[cell])
            print(done[cell], file=sys.stderr, flush=True)
    answer("reuse", result(done, file.read_more()), smoke=given.smoke)


if __name__ == "__main__":
    main()
