"""Several runs side by side: what was set differently, where each metric ended, and whether seeds tell them apart.

Every number is one of `metrics.jsonl`, or a mean of some of them.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import random
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.config import default_settings, read_settings
from asyncrl.errors import RunFolderError
from asyncrl.telemetry.folder.resumed import CONFIG_FILE
from asyncrl.telemetry.metrics.log import METRICS_FILE
from asyncrl.telemetry.metrics.registry import OF_EVERY_ROW, metric_of
from asyncrl.telemetry.reports.summary import OF_ONE_RUN, Row, evaluated, read_metrics, series

SHOWN = (
    "reward/mean", "loss/total", "kl/behavior", "policy/entropy", "ratio/E/ess_seq", "optim/grad_norm",
    "completion/length_mean", "completion/truncated", "reward/zero_variance_groups", "staleness/mean", "goodput/share",
    "reward/failed", "idle/learner", "idle/rollout", "perf/trained_tokens_per_s",
)  # fmt: skip
"""In this order; evaluations come first. Those that no run has are left out."""
TAIL = 0.1
"""The end of a curve is the mean over this share of its values, the last ones; at least one, at most `TAIL_MOST`."""
TAIL_MOST = 50
ALONE_BYTES = 32 << 20
"""Of metrics that one process reads in about a second."""
Read = TypeVar("Read")
PERMUTATIONS = 20_000
"""So many ways of dealing out the seeds are tried one by one; of more, as many are drawn."""


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    """Of its folder; with those above it where two are called alike."""
    folder: Path
    settings: Mapping[str, Any]
    """By dotted key."""
    rows: Sequence[Row]
    """Of its metrics those that are compared: all of many long runs do not fit into memory together."""


@dataclass(frozen=True, slots=True)
class End:
    """Where a curve ended."""

    value: float
    """Mean over the last `count` of its values."""
    count: int
    step: int
    """Of the last one."""
    last: float


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one metric between two experiments of several seeds each."""

    metric: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    """Names of their runs."""
    means: tuple[float, float]
    p: float
    """How often a difference at least as large comes of dealing out the same values by chance (two-sided)."""
    least_p: float
    """What it is at the least with so few seeds."""


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Raises RunFolderError where there is no run, or nothing that it wrote down."""
    names, settings = names_of(folders), [settings_of(folder) for folder in folders]
    return list(map(Run, names, folders, settings, of_each(folders, compared_rows)))


def compared_rows(folder: Path) -> list[Row]:
    kept = {*SHOWN, *OF_EVERY_ROW}
    return [
        {name: value for name, value in row.items() if name in kept or name.startswith("eval/")}
        for row in read_metrics(folder)
    ]


def of_each(folders: Sequence[Path], read: Callable[[Path], Read]) -> list[Read]:
    """One folder after the other in a process, since the rows of many do not fit into memory together; in several,
    where there is more to read than it takes to start them."""
    sizes = [path.stat().st_size for folder in folders if (path := folder / METRICS_FILE).exists()]
    workers = min(len(folders), os.cpu_count() or 1)
    if sum(sizes) < ALONE_BYTES or workers < 2 or threading.active_count() > 1:  # a fork copies no other thread
        return [read(folder) for folder in folders]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(read, folders))


def settings_of(folder: Path) -> dict[str, Any]:
    """By dotted key. Raises RunFolderError where there is no run."""
    if not (folder / CONFIG_FILE).is_file():
        raise RunFolderError(f"{folder} is not a run folder: it has no {CONFIG_FILE}. Give folders such as runs/NAME")
    return read_settings(folder / CONFIG_FILE)


def names_of(folders: Sequence[Path]) -> list[str]:
    """The end of each path, as long as it takes to tell them apart.

    Raises:
        RunFolderError: two paths lead to one folder. Counted twice, a run would stand for two seeds.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        place = folder.resolve()
        if place in found:
            raise RunFolderError(f"{place} is given twice, as {found[place]} and as {folder}. Give each run once")
        found[place] = folder
    parts = [folder.parts for folder in found]
    depths = ([part[-depth:] for part in parts] for depth in range(1, max(map(len, parts)) + 1))
    return next(["/".join(ends) for ends in each] for each in depths if len(set(each)) == len(each))


UNKNOWN = "unknown there"
"""Of a setting that the version which made a run did not have."""


def different_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Key -> its value in each run, of those that are not the same in all. A run whose version did not know a setting
    did what its default does: `UNKNOWN` stands there, if others did something else."""
    usual = default_settings()
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    found = {}
    for key in keys:
        values = [run.settings.get(key, UNKNOWN) for run in runs]
        known = [usual.get(key, UNKNOWN) if key not in run.settings else run.settings[key] for run in runs]
        if any(value != known[0] for value in known):
            found[key] = values
    return found


def shown(value: Any) -> str:
    """A setting's value as one types it."""
    return "null" if value is None else str(value)


def metrics_of(runs: Sequence[Run]) -> list[str]:
    """What is compared: evaluations, then `SHOWN`."""
    sets = sorted({f"eval/{name}/{metric}" for run in runs for name, metric in evaluated(run.rows)})
    known = {name for run in runs for row in run.rows for name in row} - set(OF_EVERY_ROW)
    return [*sets, *(name for name in SHOWN if name in known)]


def end_of(run: Run, metric: str) -> End | None:
    """None where the run has no value."""
    return end_of_values(metric, *series(run.rows, metric))


def end_of_values(metric: str, steps: Sequence[int], values: Sequence[float]) -> End | None:
    """Likewise. An evaluation is few and dear: its last value alone counts."""
    if not values:
        return None
    count = 1 if metric.startswith("eval/") else max(1, min(TAIL_MOST, int(len(values) * TAIL)))
    return End(statistics.fmean(values[-count:]), count, steps[-1], values[-1])


def best_of(metric: str, ends: Sequence[End | None]) -> float | None:
    """None where no way is better, or all ended alike."""
    known = metric_of(metric)
    choose = {"higher": max, "lower": min}.get(known.better if known else "")
    values = [end.value for end in ends if end is not None]
    return choose(values) if choose and len(set(values)) > 1 else None


def experiments(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ in nothing but `OF_ONE_RUN` stand together, in the order they were given."""
    found: dict[str, list[Run]] = {}
    usual = default_settings()
    for run in runs:
        rest = {k: v for k, v in run.settings.items() if k not in OF_ONE_RUN and (k not in usual or v != usual[k])}
        found.setdefault(repr(sorted(rest.items())), []).append(run)
    return list(found.values())


def differences(runs: Sequence[Run], metric: str) -> list[Difference]:
    """Between every two experiments that have at least two seeds each."""
    found = []
    for first, second in itertools.combinations([each for each in experiments(runs) if len(each) > 1], 2):
        known = [{run.name: end.value for run in each if (end := end_of(run, metric))} for each in (first, second)]
        if min(map(len, known)) < 2:
            continue
        names, ends = (tuple(known[0]), tuple(known[1])), [list(each.values()) for each in known]
        means = statistics.fmean(ends[0]), statistics.fmean(ends[1])
        ways = math.comb(len(ends[0]) + len(ends[1]), len(ends[0]))
        least = (2 if len(ends[0]) == len(ends[1]) else 1) / ways
        found.append(Difference(metric, names[0], names[1], means, by_chance(ends[0], ends[1]), least))
    return found


def by_chance(first: Sequence[float], second: Sequence[float]) -> float:
    """p of the difference of the means by a permutation test, two-sided (Fisher 1935): exact while there are at most
    `PERMUTATIONS` ways to deal the values out, else drawn with a fixed seed."""
    values, size = [*first, *second], len(first)
    whole = math.fsum(values)
    observed = abs(statistics.fmean(first) - statistics.fmean(second))

    def as_far(chosen: Sequence[int]) -> bool:
        total = math.fsum(values[place] for place in chosen)
        apart = abs(total / size - (whole - total) / (len(values) - size))
        return apart >= observed * (1 - 1e-9)

    places = range(len(values))
    if math.comb(len(values), size) <= PERMUTATIONS:
        ways = [as_far(chosen) for chosen in itertools.combinations(places, size)]
        return sum(ways) / len(ways)
    draw = random.Random(0)
    drawn = sum(as_far(draw.sample(places, size)) for _ in range(PERMUTATIONS))
    return (drawn + 1) / (PERMUTATIONS + 1)
