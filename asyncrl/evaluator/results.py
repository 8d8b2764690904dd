"""Turns the samples of an evaluation into `results.json` and the printed table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from asyncrl.evaluation.intervals import CONFIDENCE
from asyncrl.evaluation.samples import Sample
from asyncrl.evaluation.table import ALL, TableLine, tabulate
from asyncrl.evaluator.samples import scores_of
from asyncrl.schema import Config

REASONS = 5
"""Number of failure reasons that are shown."""
SHOWN = 300
"""Characters shown of each."""


def table_of(config: Config, done: Mapping[int, Sequence[Sample]]) -> tuple[TableLine, ...]:
    settings = config.eval
    rows = (scores_of(row, samples, settings.answer) for row, samples in done.items())
    return tabulate(rows, samples=settings.samples, pass_score=settings.pass_score, seed=config.seed)


def results(
    config: Config, made_of: Mapping[str, Any], table: Sequence[TableLine], done: Mapping[int, Sequence[Sample]]
) -> dict[str, Any]:
    """The content of `results.json`."""
    return {
        "model": config.model.path,
        "samples": config.eval.samples,
        "temperature": config.eval.temperature,
        "top_p": config.eval.top_p,
        "top_k": config.eval.top_k,
        "min_p": config.eval.min_p,
        "pass_score": config.eval.pass_score,
        "answer": config.eval.answer,
        "confidence": CONFIDENCE,
        "table": [_plain(line) for line in table],
        "failures": dict(reasons(done)),
        "made_of": dict(made_of),
    }


def _plain(line: TableLine) -> dict[str, Any]:
    figures = {name: asdict(estimate) for name, estimate in line.estimates.items()}
    return {"name": line.name, "rows": line.rows, "samples": line.samples, "failed": line.failed, **figures}


def reasons(done: Mapping[int, Sequence[Sample]]) -> list[tuple[str, int]]:
    """`(why samples failed, how many)`, the most common first."""
    return _counted(done).most_common(REASONS)


def failure_lines(done: Mapping[int, Sequence[Sample]]) -> list[str]:
    """Lines of text: the most common reasons for which samples failed, and how many kinds of reasons there are."""
    counted = _counted(done)
    lines = [f"failed, {count} sample(s): {' '.join(reason.split())}" for reason, count in counted.most_common(REASONS)]
    if len(counted) > 1:
        shown = f", the {REASONS} most common above" if len(counted) > REASONS else ""
        lines.append(f"{sum(counted.values())} samples failed, for {len(counted)} different reasons{shown}")
    return lines


def _counted(done: Mapping[int, Sequence[Sample]]) -> Counter[str]:
    return Counter(sample.failed[:SHOWN] for samples in done.values() for sample in samples if sample.failed)


def text_of(table: Sequence[TableLine], samples: int) -> list[str]:
    """The table as lines of text: each data source, then all rows."""
    metrics = shown_metrics(table, samples)
    head = ["data_source", "rows", "failed", *metrics]
    body = [
        [line.name, str(line.rows), str(line.failed), *(_figure(line, metric) for metric in metrics)] for line in table
    ]
    widths = [max(len(row[column]) for row in [head, *body]) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *body]
    ]


def shown_metrics(table: Sequence[TableLine], samples: int) -> list[str]:
    """The metrics worth a column. Duplicates are left out: for right-or-wrong scores, pass@1 is the average and best@k
    is pass@k. `results.json` has all of them."""
    (whole,) = [line for line in table if line.name == ALL]
    known, average = whole.estimates, f"avg@{samples}"
    twins = {"pass@1": average, f"best@{samples}": f"pass@{samples}" if samples > 1 else average}
    wanted = dict.fromkeys((average, "pass@1", f"pass@{samples}", f"maj@{samples}" * (samples > 1), f"best@{samples}"))
    return [
        metric
        for metric in wanted
        if metric in known and (metric not in twins or abs(known[metric].value - known[twins[metric]].value) > 1e-9)
    ]


def _figure(line: TableLine, metric: str) -> str:
    found = line.estimates.get(metric)
    if found is None:
        return ""
    within = "" if found.low is None or found.high is None else f" [{found.low:.3f}, {found.high:.3f}]"
    return f"{found.value:.3f}{within}"
