"""`asyncrl compare RUN RUN ...`: see `asyncrl.telemetry.reports.compared`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from asyncrl.telemetry.live.console import PlainConsole
from asyncrl.telemetry.metrics.registry import metric_of
from asyncrl.telemetry.reports.compared import (
    TAIL,
    TAIL_MOST,
    Difference,
    End,
    Run,
    best_of,
    differences,
    different_settings,
    end_of,
    metrics_of,
    read_runs,
    shown,
)
from asyncrl.telemetry.reports.summary import diverged_from

ABSENT = "-"


def main(folders: Sequence[Path], *, as_json: bool) -> int:
    """Raises RunFolderError."""
    runs = read_runs(folders)
    metrics = metrics_of(runs)
    ends = {metric: [end_of(run, metric) for run in runs] for metric in metrics}
    apart = [found for metric in metrics for found in differences(runs, metric)]
    if as_json:
        print(json.dumps(as_object(runs, ends, apart), indent=1, default=str))
        return 0
    console = PlainConsole(highlight=False, soft_wrap=True, markup=False, emoji=False)  # names may contain markup
    console.print_whole(settings_table(runs))
    console.print_whole(ends_table(runs, ends))
    if any(diverged_from(run.rows) is not None for run in runs):
        console.print("For a run that diverged (its loss was not finite until the end), they are of the steps before.")
    console.print(
        f"Each is the mean over the last {TAIL:.0%} of the steps (at most {TAIL_MOST}); an evaluation's is its last. "
        "The last step is in the first line."
    )
    if len({run.rows[-1]["step"] for run in runs if run.rows}) > 1:
        console.print("The runs have not trained the same number of steps: each is compared where it ended.")
    for found in apart:
        console.print(sentence(found))
    if not apart:
        console.print(
            "To learn whether chance explains a difference, compare at least two settings with at least two seeds each."
        )
    return 0


def as_object(runs: Sequence[Run], ends: dict[str, list[End | None]], apart: Sequence[Difference]) -> dict[str, Any]:
    return {
        "runs": [
            {"name": run.name, "folder": str(run.folder), "rows": len(run.rows), "diverged": diverged_from(run.rows)}
            for run in runs
        ],
        "settings": different_settings(runs),
        "ends": {metric: [None if end is None else asdict(end) for end in each] for metric, each in ends.items()},
        "differences": [asdict(found) for found in apart],
    }


def settings_table(runs: Sequence[Run]) -> Table:
    table = Table("setting", *(run.name for run in runs), title="settings that differ", title_justify="left")
    for key, values in different_settings(runs).items():
        table.add_row(key, *map(shown, values))
    return table


def ends_table(runs: Sequence[Run], ends: dict[str, list[End | None]]) -> Table:
    """Return the table of final values. The best is marked for metrics with a better direction."""
    table = Table("metric", "unit", *(run.name for run in runs), title="where they ended", title_justify="left")
    table.add_row("step", "", *map(last_step, runs))
    for metric, each in ends.items():
        known = metric_of(metric)
        mark = best_of(metric, each)
        cells = [ABSENT if end is None else f"{end.value:.4g}{' *' if end.value == mark else ''}" for end in each]
        table.add_row(metric, known.unit if known else "", *cells)
    return table


def last_step(run: Run) -> str:
    if not run.rows:
        return ABSENT
    broken = diverged_from(run.rows)
    return f"{run.rows[-1]['step']}" + (f" (diverged from {broken} on)" if broken is not None else "")


def sentence(found: Difference) -> str:
    first, second = (
        f"{mean:.4g} ({len(names)} seeds: {', '.join(names)})"
        for mean, names in zip(found.means, (found.first, found.second), strict=True)
    )
    enough = "" if found.least_p <= 0.05 else f"; with so few seeds it cannot be below {found.least_p:.2g}"
    return f"{found.metric}: {first} against {second}, p = {found.p:.2g} by chance{enough}"
