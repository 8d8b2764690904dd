"""What rank 0 writes about a step and the evaluations that came with it, and how the best checkpoint is chosen."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from asyncrl.evaluation.orders import EvalSummary
from asyncrl.evaluation.samples import to_line
from asyncrl.learner.model.flops import speed
from asyncrl.learner.step.metrics import Measured, plan_metrics
from asyncrl.learner.step.step import OPERATIONS, PACKED_TOKENS
from asyncrl.replay.protocol import Lease, TrainedReply
from asyncrl.storage.best import BestCheckpoint
from asyncrl.telemetry.metrics.log import MetricsLog
from asyncrl.weights.base import PublishStats

log = logging.getLogger(__name__)


def write_evaluations(log: MetricsLog, summaries: Iterable[EvalSummary], metrics: Mapping[str, str]) -> None:
    """Write one row per evaluation, at the step of the oldest weights that it measured.

    Args:
        metrics: name of each set's mean, see `reward.metric`.
    """
    for summary in summaries:
        # Each step publishes one version, and no evaluation is requested of a version that an earlier learner
        # published.
        step = summary.step + summary.version_min - summary.policy_version
        log.write(step, summary.version_min, evaluation_metrics(summary, metrics[summary.eval_set]))
        log.samples(step, [to_line(sample) for sample in summary.samples], summary.eval_set)


def evaluation_metrics(summary: EvalSummary, metric: str) -> dict[str, float]:
    """`eval/<name>/*`; the mean has the name `metric`, other metrics keep theirs."""
    name = f"eval/{summary.eval_set}"
    row = {
        f"{name}/count": float(summary.count),
        f"{name}/failed": float(summary.failed),
        f"{name}/version_min": float(summary.version_min),
        f"{name}/version_max": float(summary.version_max),
        f"{name}/superseded": float(summary.superseded),
    }
    if summary.count:  # if every row failed, nothing is known of the policy: this is not a reward of 0
        known = (("", summary.mean), ("_low", summary.low), ("_high", summary.high))
        row |= {f"{name}/{metric}{end}": value for end, value in known if value is not None}
    return row | {f"{name}/{figure}": value for figure, value in summary.figures.items()}


def tell_best(
    best: BestCheckpoint,
    trained: int,
    version: int,
    row: Mapping[str, float],
    summaries: Iterable[EvalSummary],
    metrics: Mapping[str, str],
) -> None:
    """Report the current values of `learner.keep_best`: of the trained step, and of evaluations that came with it."""
    found = [
        (
            each.step,
            evaluation_metrics(each, metrics[each.eval_set]).get(best.metric),
            (each.version_min, each.version_max),
        )
        for each in summaries
        if best.metric.startswith(f"eval/{each.eval_set}/")
    ]
    if best.metric in row:
        found.append((trained, row[best.metric], (version, version)))
    for step, value, versions in found:
        if best.told(step, value, versions):
            log.info("the best checkpoint is now that of step %d: %s %g", step, best.metric, value)


def step_row(
    lease: Lease,
    measured: Measured,
    sent: PublishStats,
    sending: Mapping[str, float],
    reply: TrainedReply,
    times: dict[str, float],
    ranks: int,
    peak: float | None,
) -> dict[str, float]:
    """Everything known about a step, by metric name.

    Args:
        peak: FLOP/s of a rank's GPU, see `peak_of`.
    """
    row = dict(reply.metrics) | plan_metrics(lease.plan) | measured.row()
    row |= {"weights/wait_previous_s": sent.wait_previous_s, "weights/bytes": float(sent.nbytes)}
    row |= dict(sending) | times
    seconds = times["time/step"]
    row["idle/learner"] = times["time/wait_batch"] / seconds
    row["perf/trained_tokens_per_s"] = row.pop("perf/trained_tokens") / seconds
    trained_s = times["time/train"]
    row |= speed(row.pop(OPERATIONS), row.pop(PACKED_TOKENS), trained_s, ranks, peak)
    row["perf/groups_per_s"] = len(lease.plan.groups) / seconds
    return row
