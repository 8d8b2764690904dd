"""Compares several runs: settings that differ, final values of each metric, and whether they differ beyond seeds.

Every number is from `metrics.jsonl`, or a mean of such numbers.
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
from asyncrl.telemetry.folder.resumed import settings_file
from asyncrl.telemetry.metrics.log import METRICS_FILE
from asyncrl.telemetry.metrics.registry import OF_EVERY_ROW, metric_of
from asyncrl.telemetry.reports.summary import OF_ONE_RUN, Row, evaluated, read_metrics, series

SHOWN = (
    "reward/mean", "loss/total", "kl/behavior", "policy/entropy", "ratio/E/ess_seq", "optim/grad_norm",
    "completion/length_mean", "completion/truncated", "reward/zero_variance_groups", "staleness/mean", "goodput/share",
    "reward/failed", "idle/learner", "idle/rollout", "perf/trained_tokens_per_s",
)  # fmt: skip
"""Compared metrics in this order, after the evaluations. Metrics that no run has are left out."""
TAIL = 0.1
"""The end of a curve is the mean over the last values, this fraction of them; at least one, at most `TAIL_MOST`."""
TAIL_MOST = 50
ALONE_BYTES = 32 << 20
"""Bytes of metrics that one process reads in about a second."""
Read = TypeVar("Read")
PERMUTATIONS = 20_000
"""Up to this number of permutations, all are enumerated; otherwise this number is sampled."""


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    """Name of its folder, with parent folders if two have the same name."""
    folder: Path
    settings: Mapping[str, Any]
    """Settings by dotted key."""
    rows: Sequence[Row]
    """Rows with only the compared metrics: all metrics of many long runs do not fit into memory together."""


@dataclass(frozen=True, slots=True)
class End:
    """Where a curve ended."""

    value: float
    """Mean over the last `count` values."""
    count: int
    step: int
    """Step of the last value."""
    last: float


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of one metric between two experiments of several seeds each."""

    metric: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    """Names of the second experiment's runs, as `first` has those of the first."""
    means: tuple[float, float]
    p: float
    """Probability of a difference at least as large if the same values are assigned at random (two-sided)."""
    least_p: float
    """Smallest possible p with this number of seeds."""


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Raises RunFolderError if a folder has no run, or the run has no records."""
    names, settings = names_of(folders), [settings_of(folder) for folder in folders]
    return list(map(Run, names, folders, settings, of_each(folders, compared_rows)))


def compared_rows(folder: Path) -> list[Row]:
    kept = {*SHOWN, *OF_EVERY_ROW}
    return [
        {name: value for name, value in row.items() if name in kept or name.startswith("eval/")}
        for row in read_metrics(folder)
    ]


def of_each(folders: Sequence[Path], read: Callable[[Path], Read]) -> list[Read]:
    """Read one folder after another, since the rows of many do not fit into memory together; in several processes if
    reading takes longer than starting them."""
    sizes = [path.stat().st_size for folder in folders if (path := folder / METRICS_FILE).exists()]
    workers = min(len(folders), os.cpu_count() or 1)
    if sum(sizes) < ALONE_BYTES or workers < 2 or threading.active_count() > 1:  # a fork would not copy other threads
        return [read(folder) for folder in folders]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(read, folders))


def settings_of(folder: Path) -> dict[str, Any]:
    """Return a run's settings by dotted key. Raises RunFolderError if the folder has no run."""
    return read_settings(settings_file(folder))


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the end of each path, with as many components as are needed to distinguish them.

    Raises:
        RunFolderError: two paths lead to the same folder. Counted twice, a run would appear as two seeds.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        place = folder.resolve()
        if place in found:
            raise RunFolderError(f"{place} is given twice, as {found[place]} and as {folder}. Name each run once")
        found[place] = folder
    parts = [folder.parts for folder in found]
    depths = ([part[-depth:] for part in parts] for depth in range(1, max(map(len, parts)) + 1))
    return next(["/".join(ends) for ends in each] for each in depths if len(set(each)) == len(each))


UNKNOWN = "unknown there"
"""Shown for a setting that did not exist in the version that made a run."""


def different_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return key -> its value in each run, for settings that are not the same in all. A run whose version did not have
    a setting counts as using its default, and gets `UNKNOWN` if others differ."""
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
    """Return a setting's value as it is typed."""
    return "null" if value is None else str(value)


def metrics_of(runs: Sequence[Run]) -> list[str]:
    """Return the names of the compared metrics: evaluations, then `SHOWN`."""
    sets = sorted({f"eval/{name}/{metric}" for run in runs for name, metric in evaluated(run.rows)})
    known = {name for run in runs for row in run.rows for name in row} - set(OF_EVERY_ROW)
    return [*sets, *(name for name in SHOWN if name in known)]


def end_of(run: Run, metric: str) -> End | None:
    """Return the end of a run's curve; None if the run has no value."""
    return end_of_values(metric, *series(run.rows, metric))


def end_of_values(metric: str, steps: Sequence[int], values: Sequence[float]) -> End | None:
    """As `end_of`. For an evaluation only the last value counts, since there are few."""
    if not values:
        return None
    count = 1 if metric.startswith("eval/") else max(1, min(TAIL_MOST, int(len(values) * TAIL)))
    return End(statistics.fmean(values[-count:]), count, steps[-1], values[-1])


def best_of(metric: str, ends: Sequence[End | None]) -> float | None:
    """Return the best end; None if neither direction is better, or all are equal."""
    known = metric_of(metric)
    choose = {"higher": max, "lower": min}.get(known.better if known else "")
    values = [end.value for end in ends if end is not None]
    return choose(values) if choose and len(set(values)) > 1 else None


def experiments(runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs that differ only in `OF_ONE_RUN`, in the given order."""
    found: dict[str, list[Run]] = {}
    usual = default_settings()
    for run in runs:
        rest = {k: v for k, v in run.settings.items() if k not in OF_ONE_RUN and (k not in usual or v != usual[k])}
        found.setdefault(repr(sorted(rest.items())), []).append(run)
    return list(found.values())


def differences(runs: Sequence[Run], metric: str) -> list[Difference]:
    """Return the differences between each pair of experiments with at least two seeds each."""
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
    """Return p of the difference of the means by a permutation test, two-sided (Fisher 1935): exact for at most
    `PERMUTATIONS` permutations, otherwise sampled with a fixed seed."""
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
