"""Cells of a table of runs: what one is, how it is run in one process, the file that finished ones are appended to."""

from __future__ import annotations

import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from asyncrl.cli.quickstart import prepare, quickstart_overrides, recipe_of
from asyncrl.config import load_config
from asyncrl.errors import AsyncRLError
from asyncrl.learner.parallel.place import Place, prepare_process
from benchmarks.parts import gym_base
from benchmarks.parts.answer import commit
from benchmarks.parts.held_age import Rollouts, run_held
from benchmarks.parts.quickstart import ACCURACY


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    settings: tuple[str, ...] = ()
    """What `asyncrl quickstart` is told for it."""
    paths: Callable[[], list[str]] = list
    """Makes its base model and rows where they are not those of `asyncrl quickstart`, and says where they are."""
    measured: str = ACCURACY


TASKS = {
    "reverse": Task(),
    # Two turns: the model asks a calculator, and answers with what it said.
    "two_turns": Task(settings=("experiment=tools_quickstart", "learner.steps=100")),
    # A model of 3 M parameters, on four tasks of reasoning-gym at once.
    "reasoning_gym": Task(settings=gym_base.SETTINGS, paths=gym_base.paths, measured=gym_base.MEASURED),
}
LOSSES: dict[str, tuple[str, ...]] = {
    "no_correction": (),
    "ppo": (),
    # One update per batch, as of the others, or an age in versions would be twice as many optimizer steps. Its clip is
    # idle then, and the cap on the behavior weight (AReaL's) is what is left to compare.
    "decoupled_ppo": ("loss.weight_high=5.0", "learner.updates_per_batch=1"),
    "tis": (),
    "cispo": (),
    # As its cells were run; it is 0.01 by default since, which is said behind the command and then counts.
    "dppo_tv": ("loss.behavior_kl=0.001",),
    "m2po_paper": (),
    # With a critic, as in configs/experiment/vtrace.yaml: the correction is in the advantage.
    "vtrace": ("advantage=vtrace", "critic.lr=1e-3", "critic.warmup_steps=5"),
}
"""Loss -> settings that it needs beside its preset."""
CENTERING = ("loss.centering=true", "engine.record_topk=64")
UNCENTERED = ("m2po_paper", "dppo_tv", "ppo")
"""Losses that refuse to be centered: what a token weighs depends on all others, or is gated by the advantage's sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    task: str = "reverse"
    loss: str
    centering: bool = False
    staleness: int
    """Of all data, in versions; of a live run the bound."""
    lr: float
    reuse: int = 1
    """Times that each group is trained (`replay.max_times_sampled`)."""
    seed: int
    live: bool = False
    """A run of its own processes, as users start them."""

    def settings(self) -> list[str]:
        """But those that say how old data gets. The first time the base model of its task is made."""
        centering = CENTERING if self.centering else ()
        named = (f"seed={self.seed}", f"loss={self.loss}", f"learner.lr={self.lr}")
        task = TASKS[self.task]
        return [*task.settings, *task.paths(), *named, *LOSSES[self.loss], *centering]


def run_cell(cell: Cell, overrides: Sequence[str]) -> dict[str, Any]:
    """In this process. A run that ends itself (gradients that are not finite) has no accuracy and says why.

    With reuse each step is given 1 / reuse of the groups that it trains: rollouts are what there is too little of.
    """
    # Groups age while they wait to be used again: as much room as they can need, whatever age they came with.
    room = cell.staleness + (4 * cell.reuse if cell.reuse > 1 else 0)
    gates = (f"replay.max_staleness={room}", f"replay.pipeline_depth={min(cell.reuse, room - cell.staleness)}")
    reuse = (f"replay.max_times_sampled={cell.reuse}", "rollout=process", "resume=never")
    asked = [*cell.settings(), *gates, *reuse, *overrides]
    config = load_config(quickstart_overrides(prepare(recipe_of(TASKS[cell.task].settings)), asked))
    prepare_process(Place(rank=0, world=1, device=torch.device("cpu"), restarted=False, run_id="cell"), logging.WARNING)
    started, busy = time.perf_counter(), time.process_time()
    try:
        with Rollouts(config) as rollouts:
            run = run_held(
                config, rollouts, age=cell.staleness, groups=-(-config.learner.groups_per_step // cell.reuse)
            )
    except AsyncRLError as error:
        return {**asdict(cell), "overrides": list(overrides), "commit": commit(), "failed": str(error)}
    curve = [(int(row["step"]), round(row[TASKS[cell.task].measured], 4)) for row in run.rows.evaluations]
    later = run.rows.steps[len(run.rows.steps) // 2 :]
    return {
        **asdict(cell),
        "overrides": list(overrides),
        "commit": commit(),
        "curve": [[step, value, run.generated_by[step - 1] if step else 0] for step, value in curve],
        "final": curve[-1][1],
        "age": round(statistics.mean(row["staleness/mean"] for row in later), 2),
        "tokens": run.generated_by[-1],
        "wall_s": round(time.perf_counter() - started, 1),
        "cpu_s": round(time.process_time() - busy, 1),
    }


class CellsFile:
    """Finished cells, a line each: only ever appended to, so that a stopped table goes on where it was.

    Args:
        overrides: extra settings; a cell that was run with others is another one.
    """

    def __init__(self, path: Path, overrides: Sequence[str]) -> None:
        self._path, self._overrides = path, list(overrides)

    def read(self) -> dict[Cell, dict[str, Any]]:
        return {cell_of(row): row for row in self._rows() if row["overrides"] == self._overrides}

    def read_more(self) -> dict[str, dict[Cell, dict[str, Any]]]:
        """Cells that were run with these settings and more -> what more, as on the command line."""
        found: dict[str, dict[Cell, dict[str, Any]]] = {}
        for row in self._rows():
            more = [given for given in row["overrides"] if given not in self._overrides]
            if more and set(self._overrides) <= set(row["overrides"]):
                found.setdefault(" ".join(more), {})[cell_of(row)] = row
        return found

    def _rows(self) -> list[dict[str, Any]]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [json.loads(line) for line in lines if line.strip()]

    def append(self, row: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def cell_of(row: dict[str, Any]) -> Cell:
    return Cell(**{field.name: row[field.name] for field in fields(Cell)})


def in_percent(rows: Sequence[dict[str, Any]], seeds: int) -> str:
    """Mean (lowest–highest) of the final accuracies; how many seeds these are where it is not `seeds`."""
    if not rows:
        return ""
    finals = [100 * row["final"] for row in rows if "final" in row]
    broken = len(rows) - len(finals)
    parts = [f"{statistics.mean(finals):.1f}"] if finals else []
    if finals and min(finals) != max(finals):
        parts[0] += f" ({min(finals):.1f}–{max(finals):.1f})"
    if broken:
        parts.append(f"{broken} ended themselves")
    if len(rows) != seeds:
        parts.append(f"{len(rows)} seed" + "s" * (len(rows) > 1))
    return ", ".join(parts)
