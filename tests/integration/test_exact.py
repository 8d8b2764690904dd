"""The quickstart with `engine.exact=true`, as a user starts it: engine and learner never differ at the same version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.telemetry.metrics.evaluations import is_evaluation

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]


def asyncrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )


@pytest.mark.parametrize(
    "settings",
    [
        ["replay=sync"],
        ["replay=sync", "learner.ranks=2"],
        ["rollout.temperature=0.8", "rollout.top_p=0.9"],
    ],
    ids=["sync", "ranks", "async"],
)
def test_ratios_of_fresh_tokens_are_one_and_the_canary_finds_nothing(settings: list[str], tmp_path: Path) -> None:
    command = ["quickstart", "engine.exact=true", "weights.on_update=recompute"]
    fixed = ["learner.steps=12", "eval.path=", "eval.every=0", "weights.verify_every=1", "rollout.host=process"]
    done = asyncrl(*command, *fixed, "replay.journal.retain=all", f"run.dir={tmp_path}/run", *settings)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if not is_evaluation(row)]
    fresh = [row for row in steps if "staleness/age_0/max" in row]
    assert len(steps) == 12 and fresh and (len(fresh) == 12 or "replay=sync" not in settings)
    assert all(row["staleness/age_0/max"] == 1 and row["staleness/age_0/rms_log_ratio"] == 0 for row in fresh)
    assert all(row["weights/canary_max"] == 0 for row in steps)

    again = asyncrl("rerun", f"{tmp_path}/run")
    assert again.returncode == 0, again.stderr
    assert "final weights: equal to those of the run, bit for bit" in again.stdout
