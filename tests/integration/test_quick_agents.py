"""The quickstart's agents learn, from the base model to the last step, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.quickstart.prepare import AGENT_OF
from asyncrl.telemetry.metrics.evaluations import is_evaluation

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One base model of each agent for all seeds."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("experiment", AGENT_OF)
def test_an_agent_of_two_turns_learns_to_use_its_tool(experiment: str, seed: int, cache: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.cli", "quickstart", f"experiment={experiment}", f"seed={seed}"]
    done = subprocess.run(
        [*command, "rollout.host=process", f"run.dir={tmp_path}/run"],
        env=os.environ | {"ASYNCRL_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    greedy = [row["eval/heldout/accuracy"] for row in rows if is_evaluation(row)]
    assert greedy[0] < 0.3 and greedy[-1] > 0.8
    rewards = [row["reward/mean"] for row in rows if not is_evaluation(row)]
    assert rewards[0] < 0.3 and sum(rewards[-5:]) / 5 > 0.6, "as sampled, which is never as sure"
