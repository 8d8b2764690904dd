"""The quickstart with top-p 0.9 as a user starts it: it learns, and at staleness 0 its ratios are 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.telemetry.metrics.evaluations import is_evaluation

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("staleness", [["replay=sync"], []], ids=["sync", "async"])
def test_the_quickstart_learns_with_top_p(staleness: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.cli", "quickstart", "rollout.top_p=0.9", *staleness]
    done = subprocess.run(
        [*command, "rollout.host=process", f"run.dir={tmp_path}/run"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    greedy = [row["eval/heldout/accuracy"] for row in rows if is_evaluation(row)]
    assert greedy[0] < 0.5 and greedy[-1] >= 0.95
    steps = [row for row in rows if not is_evaluation(row)]
    if staleness:
        assert all(abs(row["ratio/E/mean"] - 1) < 1e-3 for row in steps)
    assert all(1 <= row["completion/support_mean"] < 264 for row in steps)
