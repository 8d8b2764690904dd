"""Writes the summary of a finished run, and suggestions what to try next."""

from __future__ import annotations

import itertools
import logging
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.schema import Config
from asyncrl.settings.replay import ReplayConfig
from asyncrl.storage.checkpoints import CHECKPOINT_DIR, last_saved
from asyncrl.storage.lines import read_lines
from asyncrl.telemetry.folder.resumed import CONFIG_FILE
from asyncrl.telemetry.metrics.advice import tuning_advice
from asyncrl.telemetry.metrics.evaluations import by_step, evaluations
from asyncrl.telemetry.metrics.log import METRICS_FILE
from asyncrl.telemetry.metrics.printed import clock, failed_rewards, who_waits

log = logging.getLogger(__name__)

Row = Mapping[str, Any]
Series = dict[str, tuple[list[int], list[float]]]
"""Metric -> (steps, values)."""

CURVES_FILE = "curves.png"
MAX_FAILED_LINES = 3
"""Limit on the evaluations of a set with failed rows that the summary names; the last ones are named."""


AGE_COLUMNS = (
    ("share", "token_share", "{:.1%}"),
    ("rms log-ratio", "rms_log_ratio", "{:.4f}"),
    ("ESS/N", "ess_token", "{:.3f}"),
    ("KL(mu|pi)", "kl_k3", "{:.5f}"),
    ("clipped", "clip_fraction", "{:.2%}"),
    ("max ratio", "max", "{:.2f}"),
)
"""Heading, metric `staleness/age_<k>/...` and number format of each column."""
AGE_OF = re.compile(r"staleness/age_(\d+)/token_share")


def read_metrics(run_dir: Path) -> list[Row]:
    """Return all complete rows, one per step, see `by_step`. Step 0 has only an evaluation. Unreadable lines are
    reported and left out, as a resume does."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    found = read_lines(path)
    rows = [row for row in found.rows if isinstance(row.get("step"), int)]
    if unread := found.unread + len(found.rows) - len(rows):
        log.warning("%s: %d lines cannot be read and are left out", path, unread)
    ends, saved = max((row["step"] for row in rows), default=0), last_saved(run_dir / CHECKPOINT_DIR)
    if ends < saved:
        log.warning(
            "%s ends at step %d, but there is a checkpoint of step %d. Was the file truncated?", path, ends, saved
        )
    return by_step(rows)


def series(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Return `(steps, values)` of the rows that have a number."""
    found = [(row["step"], float(row[name])) for row in rows if isinstance(row.get(name), int | float)]
    return [step for step, _ in found], [value for _, value in found]


def diverged_from(rows: Sequence[Row]) -> int | None:
    """Return the step from which on the loss was not finite until the end; None if the last loss was finite."""
    losses = [row for row in rows if row["step"] > 0 and "loss/total" in row]
    broken = [row["step"] for row in itertools.takewhile(lambda row: row["loss/total"] is None, reversed(losses))]
    return broken[-1] if broken else None


def evaluated(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return `(set, metric)` of all evaluations with a result."""
    return sorted({(name, found.metric) for row in rows for name, found in evaluations(row).items() if found.metric})


def summary(rows: Sequence[Row], replay: ReplayConfig | None = None) -> str:
    """Summarize a run in a few lines, from its metrics. `replay`: its settings, which the advice at the end needs."""
    trained = [row for row in rows if row["step"] > 0]
    if not trained:
        return "no step was trained"
    last = trained[-1]
    to = f" to version {last['policy_version']}" if "policy_version" in last else ""
    lines = [f"trained {last['step']} steps{to} in {clock(_trained_for(trained))}"]
    if (broken := diverged_from(rows)) is not None:
        lines.append(f"diverged: from step {broken} on the loss was not finite. Means are over the steps before")
    for label, name, form in (
        ("reward", "reward/mean", "{:.3f}"),
        ("staleness of trained tokens", "staleness/mean", "{:.2f}"),
        ("trained tokens/s", "perf/trained_tokens_per_s", "{:,.0f}"),
    ):
        _, values = series(rows, name)
        if values:
            tail = statistics.mean(values[-10:])
            lines.append(f"{label}: began at {form.format(values[0])}, mean of the last 10 steps {form.format(tail)}")
    lines += evaluation_lines(rows)
    failed = next((said for row in reversed(rows) if (said := failed_rewards(row))), "")
    if failed:
        lines.append(f"completions without a reward: {failed}")
    ages = staleness_table(trained)
    if ages:
        lines += ["learner compared with its training data, by age of the token in policy versions:", *ages]
    means = _means_of_idle_and_age(rows)
    lines += filter(None, [who_waits(means)])
    if replay is not None:
        lines += filter(None, [tuning_advice({**last, **means}, replay.pipeline_depth, replay.max_staleness)])
    return "\n".join(lines)


def staleness_table(rows: Sequence[Row], last: int = 50) -> list[str]:
    """Return lines of text, one per token age, averaged by tokens over the last rows (for the maximum, the largest).

    Args:
        rows: rows of metrics.jsonl.
        last: number of the last rows used: the policy at the end is what the next run starts from.

    Returns:
        No lines if 0 is the only age, since there is nothing to compare.
    """
    recent = rows[-last:]
    ages = sorted({int(found.group(1)) for row in recent for name in row if (found := AGE_OF.fullmatch(name))})
    if not ages or ages == [0]:
        return []
    widths = [max(len(heading), 8) for heading, _, _ in AGE_COLUMNS]
    lines = [
        "  age  " + "  ".join(heading.rjust(width) for (heading, _, _), width in zip(AGE_COLUMNS, widths, strict=True))
    ]
    for age in ages:
        cells = (_age_cell(recent, age, metric, form) for _, metric, form in AGE_COLUMNS)
        lines.append(f"{age:5d}  " + "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
    return lines


def _age_cell(rows: Sequence[Row], age: int, metric: str, form: str) -> str:
    place = f"staleness/age_{age}"
    if metric == "token_share":
        return form.format(sum(row.get(f"{place}/token_share") or 0.0 for row in rows) / len(rows))
    found = [
        (row[f"{place}/{metric}"], row[f"{place}/token_share"])
        for row in rows
        if row.get(f"{place}/{metric}") is not None and row.get(f"{place}/token_share")
    ]
    if not found:
        return ""
    if metric == "max":
        return form.format(max(value for value, _ in found))
    return form.format(sum(value * share for value, share in found) / sum(share for _, share in found))


def _trained_for(rows: Sequence[Row]) -> float:
    """Return the training time in seconds, without pauses between starts. If the clock was set back, the step's own
    duration counts."""
    total = 0.0
    for before, row in itertools.pairwise(rows):
        apart = row["time"] - before["time"]
        took = row.get("time/step")
        if took is None:
            took = max(apart, 0.0)
        total += took if apart < 0 else min(apart, took)
    return total


def evaluation_lines(rows: Sequence[Row]) -> list[str]:
    """Return lines with the change of each set's result, the failed rows, and the evaluations that were skipped."""
    lines = []
    for name, metric in evaluated(rows):
        steps, values = series(rows, f"eval/{name}/{metric}")
        best = max(range(len(values)), key=values.__getitem__)
        lines.append(
            f"{metric} on {name}: {values[0]:.3f} at step {steps[0]} -> {values[-1]:.3f} at step {steps[-1]} "
            f"(best {values[best]:.3f} at step {steps[best]})"
        )
    for name in sorted({name for row in rows for name in evaluations(row)}):
        found = [(row["step"], evaluations(row)[name]) for row in rows if name in evaluations(row)]
        lines += [f"evaluation of {name} at step {step}: {one}" for step, one in found if one.failed][
            -MAX_FAILED_LINES:
        ]
        superseded = sum(series(rows, f"eval/{name}/superseded")[1])
        if superseded:
            lines.append(
                f"{superseded:.0f} evaluations of {name} were cancelled because none of their rows had begun when the "
                "next one was due. Raise eval.every, or lower eval.rows"
            )
    return lines


def _means_of_idle_and_age(rows: Sequence[Row]) -> Row:
    names = ("idle/learner", "idle/rollout", "staleness/mean")
    return {name: statistics.mean(values) for name in names if (values := series(rows, name)[1])}


OF_ONE_RUN = ("seed", "run.name", "run.dir", "resume", "overwrite", "learner.copy_to")
"""Settings in which repeats of one experiment differ."""


LOCAL = ("asyncrl", "local")
LONGEST_TYPED = 120
"""Limit on the characters of a command that is repeated as it was typed; a longer one is repeated by its run folder."""
QUICKSTART = ("bash", "launchers/quickstart.sh"), ("asyncrl", "quickstart")
"""Its commands, as one types them."""


def without(typed: Sequence[str], settings: tuple[str, ...]) -> list[str]:
    """Return a command without these settings."""
    return [text for text in typed if text.partition("=")[0] not in settings]


def suggestions(config: Config, typed: Sequence[str], given: Sequence[str]) -> list[str]:
    """Commands worth typing next, without those that would be refused.

    Args:
        typed: the command of this run.
        given: all its settings, also those that the command did not name.
    """
    tries = []
    if config.replay.max_staleness > 0:
        tries.append(("-sync replay=sync", "exactly on-policy: the two sides take turns"))
    if tuple(typed[:2]) in QUICKSTART:  # the one task on which this was measured
        tries.append(
            (
                "-uncorrected loss=no_correction replay.max_staleness=16 replay.pipeline_depth=16 learner.lr=1e-3",
                "old data, no correction: it breaks; without `loss=no_correction` it does not",
            )
        )
    tries.append((f"-seed{config.seed + 1} seed={config.seed + 1}", "was it luck?"))
    again, kept = shlex.join(without(typed, OF_ONE_RUN)), without(given, OF_ONE_RUN)
    if len(again) > LONGEST_TYPED and tuple(typed[:2]) == LOCAL:
        again = shlex.join([*LOCAL, str(Path(config.run.dir) / CONFIG_FILE)])  # has what differs from the defaults
    lines = ((f"run.name={config.run.name}{settings}", why) for settings, why in tries)
    return [f"{again} {settings}        # {why}" for settings, why in lines if _allowed([*kept, *settings.split()])]


def _allowed(given: Sequence[str]) -> bool:
    try:
        load_config(given)
    except ConfigError:
        return False
    return True
