"""Compares a run and its rerun, as text and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from asyncrl.telemetry.reports.summary import Row, series

SHOWN_STEPS = 20
COMPARED = ("kl/behavior", "policy/entropy")
"""Metrics of the policy alone, which mean the same for any loss."""
OF_ONE_LOSS = ("loss/total", "optim/grad_norm")
"""Metrics that cannot be compared between different losses."""
LEFT_OUT = (
    f"{' and '.join(OF_ONE_LOSS)} are left out, because the two runs minimise different losses. "
    f"{' and '.join(COMPARED)} depend on the policies alone and can be compared."
)
LEGEND = """\
reward_data: mean reward of the batch that comes next, made by the run's own policy (some versions old).
estimate: the same for the rerun's policy, which has not been trained on it: rewards weighted by pi/mu per trajectory.
ess: effective sample size of those weights as a fraction. Below 0.1 the estimate says little."""


def comparison(original: Sequence[Row], again: Sequence[Row], *, same_loss: bool) -> str:
    """Return a table of at most `SHOWN_STEPS` steps, with each compared metric as `run / rerun`.

    Args:
        same_loss: whether both minimise the same loss.
    """
    compared = (*OF_ONE_LOSS, *COMPARED) if same_loss else COMPARED
    of_run = {row["step"]: row for row in original}
    head = f"{'step':>5} {'reward_data':>11} {'estimate':>9} {'ess':>6}"
    lines = [LEGEND, "", head + "".join(f" {name + ' run / rerun':>28}" for name in compared)]
    stride = max(1, -(-len(again) // SHOWN_STEPS))
    for row in again[::-stride][::-1]:
        cells = f"{row['step']:>5}" + "".join(
            f" {_number(row, f'rerun/{name}', form):>{width}}"
            for name, form, width in (("reward_of_data", ".3f", 11), ("reward_estimate", ".3f", 9), ("ess", ".2f", 6))
        )
        for name in compared:
            both = f"{_number(of_run.get(row['step'], {}), name, '.4g')} / {_number(row, name, '.4g')}"
            cells += f" {both:>28}"
        lines.append(cells)
    if not same_loss:
        lines.append(LEFT_OUT)
    return "\n".join(lines)


def _number(row: Row, name: str, form: str) -> str:
    value = row.get(name)
    return "-" if value is None else format(float(value), form)


def plot_comparison(original: Sequence[Row], again: Sequence[Row], path: Path, title: str) -> None:
    """Plot over the steps, as PNG: above, the reward of the data and its estimate; below, both policies' KL to the
    behaviour policy."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    for axes, rows, name, label in (
        (above, again, "rerun/reward_of_data", "reward of the data (the run's policy)"),
        (above, again, "rerun/reward_estimate", "estimate for the rerun's policy"),
        (below, original, "kl/behavior", "kl/behavior, run"),
        (below, again, "kl/behavior", "kl/behavior, rerun"),
    ):
        steps, values = series(rows, name)
        if steps:
            axes.plot(steps, values, label=label)
    above.set_title(title)
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(loc="best")
    figure.savefig(path, dpi=120)
