"""Eight ranks with sequence and tensor parallelism and shards, on the quickstart's task as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.quickstart.prepare import prepare, quickstart_overrides
from asyncrl.quickstart.recipes import WarmupRecipe
from asyncrl.telemetry.metrics.evaluations import is_evaluation

pytestmark = [pytest.mark.slow, pytest.mark.unhurried, pytest.mark.timeout(2700)]
LAYOUT = ["learner.ranks=8", "learner.sequence_parallel=2", "learner.tensor_parallel=2"]
FOUR_HEADS = WarmupRecipe(heads=4)
"""The quickstart's model has two, which cannot be cut into four."""


def test_eight_ranks_learn_the_quickstarts_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))
    base = prepare(FOUR_HEADS)
    short = ["learner.steps=10", "learner.lr=5e-4", "eval.every=0", "rollout.host=process", "weights.timeout_s=300"]
    given = quickstart_overrides(base, [*LAYOUT, *short, f"run.dir={tmp_path}/run"])
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", "local", *given],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    greedy = [row["eval/heldout/accuracy"] for row in rows if is_evaluation(row)]
    assert greedy[-1] > greedy[0] + 0.15
