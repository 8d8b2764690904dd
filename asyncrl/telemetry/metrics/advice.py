"""Which setting to change for more tokens per second or fresher ones: one sentence from idle shares and ages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WAITS = 0.1
"""Share of the time above which a side counts as waiting."""
OVER_AGE = 0.05
"""Share of the finished tokens above which being too old counts as waste."""
LOST_TO_AGE = ("goodput/lost_stale", "goodput/lost_masked")


def over_age_share(row: Mapping[str, Any]) -> float:
    """Return the share of finished tokens that were too old to be trained, from a row's totals of the run."""
    lost = sum(row.get(name) or 0.0 for name in LOST_TO_AGE)
    finished = lost + (row.get("goodput/trained_tokens") or 0.0)
    return lost / finished if finished else 0.0


def tuning_advice(row: Mapping[str, Any], pipeline_depth: int, max_staleness: int) -> str:
    """Return what to change next; empty if nothing stands out, or if the row has no idle shares (`asyncrl sft`).

    Args:
        row: `idle/learner` and `idle/rollout` as shares of the time (means over some steps), `staleness/mean` in
            versions, and the totals `goodput/*`.
        pipeline_depth, max_staleness: the run's settings.
    """
    learner, rollout = row.get("idle/learner"), row.get("idle/rollout")
    if learner is None or rollout is None:
        return ""
    if (share := over_age_share(row)) > OVER_AGE:
        lower = ", or lower replay.pipeline_depth or rollout.max_in_flight" if pipeline_depth else ""
        return f"{share:.0%} of the tokens were too old to be trained: raise replay.max_staleness{lower}"
    if learner > WAITS and rollout > WAITS:
        both = f"the learner waits {learner:.0%} and the rollouts {rollout:.0%} of the time"
        if pipeline_depth < max_staleness:
            return f"{both}: raise replay.pipeline_depth={pipeline_depth}, which lets them work at the same time"
        return f"{both}: raise replay.pipeline_depth={pipeline_depth} and replay.max_staleness={max_staleness} with it"
    if learner > WAITS:
        return (
            f"the learner waits {learner:.0%} of the time for rollouts that are busy: raise rollout.max_in_flight if "
            "the engines have room, or give GPUs to rollout.workers"
        )
    if rollout > WAITS:
        fresher = ", or lower replay.pipeline_depth for fresher data at the same speed" if pipeline_depth else ""
        return f"rollouts wait {rollout:.0%} of the time for the learner: give GPUs to learner.ranks{fresher}"
    if (mean := row.get("staleness/mean") or 0.0) > 1.0 and pipeline_depth > 1:
        return (
            f"nobody waits, at a mean staleness of {mean:.1f}: a lower replay.pipeline_depth may be as fast, with "
            "fresher data"
        )
    return ""
