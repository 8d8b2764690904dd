"""The advice at the end of a run: each symptom names its setting."""

from __future__ import annotations

import pytest

from asyncrl.telemetry.metrics.advice import tuning_advice

WASTE = {"goodput/trained_tokens": 900.0, "goodput/lost_stale": 60.0, "goodput/lost_masked": 40.0}


@pytest.mark.parametrize(
    ("learner", "rollout", "others", "depth", "bound", "named", "unnamed"),
    [
        (0.5, 0.4, {}, 1, 4, "raise replay.pipeline_depth=1, ", "max_staleness"),
        (0.5, 0.4, {}, 4, 4, "raise replay.pipeline_depth=4 and replay.max_staleness=4", "workers"),
        (0.5, 0.4, {}, 0, 0, "raise replay.pipeline_depth=0 and replay.max_staleness=0", "workers"),
        (0.5, 0.0, {}, 2, 4, "give GPUs to rollout.workers", "pipeline_depth"),
        (0.0, 0.5, {}, 2, 4, "give GPUs to learner.ranks, or lower replay.pipeline_depth", "workers"),
        (0.0, 0.5, {}, 0, 4, "give GPUs to learner.ranks", "pipeline_depth"),
        (0.5, 0.0, WASTE, 2, 4, "10% of the tokens were too old to be trained: raise replay.max_staleness", "GPUs"),
        (0.0, 0.0, {"goodput/trained_tokens": 990.0, "goodput/lost_masked": 10.0}, 2, 4, "", "old"),
        (0.05, 0.05, {"staleness/mean": 2.5}, 3, 4, "a lower replay.pipeline_depth may be as fast", "GPUs"),
        (0.05, 0.05, {"staleness/mean": 0.8}, 1, 4, "", "pipeline_depth"),
        (None, None, {"staleness/mean": 2.5}, 3, 4, "", "pipeline_depth"),
    ],
)
def test_each_symptom_names_its_setting(
    learner: float | None,
    rollout: float | None,
    others: dict[str, float],
    depth: int,
    bound: int,
    named: str,
    unnamed: str,
) -> None:
    said = tuning_advice({"idle/learner": learner, "idle/rollout": rollout, **others}, depth, bound)
    assert (named in said if named else said == "") and unnamed not in said
