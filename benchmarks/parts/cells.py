"""Cells of a table of runs: their settings, how to run one in one process, and the file of finished cells."""

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

from asyncrl.config import load_config
from asyncrl.errors import AsyncRLError
from asyncrl.learner.parallel.place import Place, prepare_process
from asyncrl.quickstart.prepare import prepare, quickstart_overrides, recipe_of
from benchmarks.parts import gym_base
from benchmarks.parts.answer import commit
from benchmarks.parts.held_age import Rollouts, run_held
from benchmarks.parts.quickstart import ACCURACY


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    settings: tuple[str, ...] = ()
    """Settings of `asyncrl quickstart` for this task."""
    paths: Callable[[], list[str]] = list
    """Makes the base model and rows if they are not those of `asyncrl quickstart`. Returns settings that name them."""
    measured: str = ACCURACY


TASKS = {
    "reverse": Task(),
    # Two turns: the model calls a calculator and answers with its result.
    "two_turns": Task(settings=("experiment=tools_quickstart", "learner.steps=100")),
    # A model of 3 M parameters, on four tasks of reasoning-gym at once.
    "reasoning_gym": Task(settings=gym_base.SETTINGS, paths=gym_base.paths, measured=gym_base.MEASURED),
}
LOSSES: dict[str, tuple[str, ...]] = {
    "no_correction": (),
    "ppo": (),
    # One update per batch, as for the others: with two, an age in versions would be twice as many optimizer steps. Its
    # clip has no effect then, and only the cap on the behavior weight (AReaL's) is left to compare.
    "decoupled_ppo": ("loss.weight_high=5.0", "learner.updates_per_batch=1"),
    "tis": (),
    "cispo": (),
    # The value with which its cells were run. The default is now 0.01; a value on the command line overrides this one.
    "dppo_tv": ("loss.behavior_kl=0.001",),
    "m2po_paper": (),
    # With a critic, as in configs/experiment/vtrace.yaml. The correction is in the advantage.
    "vtrace": ("advantage=vtrace", "critic.lr=1e-3", "critic.warmup_steps=5"),
}
"""Loss -> settings that it needs in addition to its preset."""
CENTERING = ("loss.centering=true", "engine.record_topk=64")
UNCENTERED = ("m2po_paper", "dppo_tv", "ppo")
"""Losses that refuse centering: the weight of a token depends on all others, or on the sign of the advantage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    task: str = "reverse"
    loss: str
    centering: bool = False
    staleness: int
    """Staleness of all data in versions; for a live run its bound."""
    lr: float
    reuse: int = 1
    """Number of times that each group is trained (`replay.max_times_sampled`)."""
    seed: int
    live: bool = False
    """Whether the cell is a run with processes of its own, as users start it."""

    def settings(self) -> list[str]:
        """Return the settings except those that control staleness. The first call makes the base model of the task."""
        centering = CENTERING if self.centering else ()
        named = (f"seed={self.seed}", f"loss={self.loss}", f"learner.lr={self.lr}")
        task = TASKS[self.task]
        return [*task.settings, *task.paths(), *named, *LOSSES[self.loss], *centering]


def run_cell(cell: Cell, overrides: Sequence[str]) -> dict[str, Any]:
    """Run a cell in this process. Returns its row.

    The row of a run that ends itself (non-finite gradients) has the reason in place of an accuracy. With reuse, each
    step gets 1 / reuse of the groups that it trains, since rollouts are the bottleneck.
    """
    # Groups age while they wait to be used again. The bound leaves them as much room as they can need at any first age.
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
    """The file of finished cells, one per line. It is only appended to, so that a stopped table goes on where it was.

    Args:
        overrides: extra settings. A cell that was run with other ones is a different cell.
    """

    def __init__(self, path: Path, overrides: Sequence[str]) -> None:
        self._path, self._overrides = path, list(overrides)

    def read(self) -> dict[Cell, dict[str, Any]]:
        return {cell_of(row): row for row in self._rows() if row["overrides"] == self._overrides}

    def read_more(self) -> dict[str, dict[Cell, dict[str, Any]]]:
        """Return the cells that were run with these settings and more, keyed by the additional settings as on the
        command line."""
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
    """Return mean (lowest–highest) of the final accuracies in percent, and the number of seeds if it is not `seeds`."""
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
