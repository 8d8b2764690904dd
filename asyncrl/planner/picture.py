"""Plots a plan. Kept apart from the search, because only this needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from asyncrl.planner.search import Plan, best_of


def plot_plan(plan: Plan, path: Path, title: str) -> None:
    """Plot the splits, the depths of the best split, and the staleness of its tokens; PNG, SVG or PDF by `path`."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    splits, depths, ages = figure.subplots(1, 3)
    figure.suptitle(title)

    by_ranks = {}
    for each in plan.tried:
        by_ranks.setdefault(each.split.ranks, []).append(each)
    best = [best_of(by_ranks[ranks]) for ranks in sorted(by_ranks)]
    splits.plot([each.split.ranks for each in best], [each.outcome.tokens_per_s for each in best], marker="o")
    splits.axvline(plan.best.split.ranks, linestyle=":", color="gray")
    splits.set_xlabel("learner ranks")
    splits.set_ylabel("trained (tokens/s)")

    by_depth = {}
    for each in by_ranks[plan.best.split.ranks]:
        by_depth.setdefault(each.pipeline_depth, each)  # the first of a depth has the most groups in flight
    found = [by_depth[depth] for depth in sorted(by_depth)]
    depths.plot(sorted(by_depth), [each.outcome.tokens_per_s for each in found], marker="o", label="tokens/s")
    depths.axvline(plan.best.pipeline_depth, linestyle=":", color="gray")
    depths.set_xlabel("replay.pipeline_depth (batches)")
    depths.set_ylabel("trained (tokens/s)")
    stale = depths.twinx()
    stale.plot(sorted(by_depth), [each.outcome.staleness_mean for each in found], "s--", color="C1", label="staleness")
    stale.set_ylabel("mean staleness (policy versions)")
    stale.set_ylim(bottom=0)

    shares = plan.best.outcome.staleness
    ages.bar(list(shares), list(shares.values()))
    ages.set_xlabel("staleness (policy versions)")
    ages.set_ylabel("trained tokens (share)")
    for axes in (splits, depths):
        axes.set_ylim(bottom=0)
    for axes in (splits, depths, ages):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=120)
