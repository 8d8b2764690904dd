"""The picture of a run's curves. Apart from the report in words: only a run that was trained needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from asyncrl.telemetry.report import Row, evaluated, series


def plot_curves(rows: Sequence[Row], path: Path, title: str) -> None:
    """Reward and evaluations above, staleness below, over the steps, as PNG."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    _plot(above, rows, "reward/mean", label="reward/mean", alpha=0.6)
    for name, metric in evaluated(rows):
        _plot(above, rows, f"eval/{name}/{metric}", label=f"eval/{name}/{metric}", marker="o", markersize=3)
    above.set_title(title)
    above.set_ylabel("reward, evaluations")
    _plot(below, rows, "staleness/mean", label="staleness/mean")
    _plot(below, rows, "staleness/max", label="staleness/max", linestyle=":")
    below.set_ylabel("staleness (policy versions)")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(loc="best")
    figure.savefig(path, dpi=120)


def _plot(axes: Axes, rows: Sequence[Row], name: str, **style: Any) -> None:
    steps, values = series(rows, name)
    if steps:
        axes.plot(steps, values, **style)
