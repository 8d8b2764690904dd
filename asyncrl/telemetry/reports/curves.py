"""Plots a run's curves. Separate from the text report, because only a run that was trained needs matplotlib."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from asyncrl.telemetry.metrics.evaluations import METRICS
from asyncrl.telemetry.metrics.registry import OF_EVERY_ROW, unit_of
from asyncrl.telemetry.reports.summary import Row, Series, series


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    names: tuple[str, ...]
    """Patterns of the names of its metrics, with `*` as wildcard."""


PANELS = (
    Panel("evaluations, with their 95 % intervals", tuple(f"eval/*/{metric}" for metric in METRICS)),
    Panel("reward of the batches", ("reward/mean",)),
    Panel("loss", ("loss/total",)),
    Panel("KL", ("kl/behavior", "kl/reference")),
    Panel("entropy", ("policy/entropy",)),
    Panel("length of completions", ("completion/length_mean",)),
    Panel("staleness", ("staleness/mean", "staleness/max")),
    Panel("failures and drops so far", ("reward/failed", "replay/dropped_*", "optim/nonfinite_steps")),
    Panel("idle", ("idle/learner", "idle/rollout", "idle/replay")),
)
"""Panels in this order; those without values are left out."""
COLUMNS, WIDTH, HEIGHT = 3, 5.0, 3.2
"""Number of panels in a row, and the size of a panel in inches."""


def plot_curves(rows: Sequence[Row], path: Path, title: str) -> None:
    """Plot each of `PANELS` over the steps, as PNG."""
    curves_of(rows, title).savefig(path, dpi=100)


def curves_of(rows: Sequence[Row], title: str) -> Figure:
    names = sorted({name for row in rows for name in row} - set(OF_EVERY_ROW))
    drawn = [(panel, found) for panel in PANELS if (found := with_values(rows, panel, names))]
    down = max(1, -(-len(drawn) // COLUMNS))
    figure = Figure(figsize=(COLUMNS * WIDTH, down * HEIGHT), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for place, (panel, found) in enumerate(drawn, start=1):
        draw(figure.add_subplot(down, COLUMNS, place), rows, panel.title, found)
    return figure


def with_values(rows: Sequence[Row], panel: Panel, names: Sequence[str]) -> Series:
    known = [name for pattern in panel.names for name in names if fnmatch.fnmatchcase(name, pattern)]
    return {name: found for name in known if (found := series(rows, name))[0]}


def draw(axes: Axes, rows: Sequence[Row], title: str, found: Series) -> None:
    units = list(dict.fromkeys(map(unit_of, found)))
    for name, (steps, values) in found.items():
        said = f"{name} ({unit_of(name)})" if len(units) > 1 else name
        (line,) = axes.plot(steps, values, label=said, marker="o" if len(steps) < 30 else "", markersize=3, linewidth=1)
        if name.startswith("eval/"):
            band(axes, rows, name, line.get_color())
    axes.set_title(title, fontsize="medium")
    axes.set_ylabel(", ".join(units))
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if not any(value for _, values in found.values() for value in values):
        axes.set_ylim(0, 1)  # for a line of zeros, matplotlib would show negative values
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small", framealpha=0.6)


def band(axes: Axes, rows: Sequence[Row], name: str, color: Any) -> None:
    """Draw the intervals of an evaluation: nothing for a value without one, a line for an isolated one."""
    ends = [(row["step"], row.get(f"{name}_low"), row.get(f"{name}_high")) for row in rows if row.get(name) is not None]
    for known, group in itertools.groupby(ends, key=lambda each: each[1] is not None and each[2] is not None):
        steps, low, high = zip(*group, strict=True)
        if known and len(steps) == 1:
            axes.vlines(steps, low, high, color=color, alpha=0.3, lw=4)
        elif known:
            axes.fill_between(steps, low, high, color=color, alpha=0.2, lw=0)
