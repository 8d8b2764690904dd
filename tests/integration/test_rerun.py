"""A finished run is audited and trained again from its journal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import StartLocal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def asyncrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_rerun_gives_the_weights_of_a_run_on_two_ranks_bit_for_bit_and_another_loss_gives_another_curve(
    start_local: StartLocal,
) -> None:
    settings = {"learner.steps": 5, "rollout.host": "process", "rollout.workers": 1, "replay.journal.retain": "all"}
    settings["learner.ranks"] = 2
    run = start_local({**settings, "rollout.top_p": 0.9})
    assert run.finish(400) == 0, run.tail()

    audited = asyncrl("audit", str(run.directory), "--json")
    found = json.loads(audited.stdout)
    assert audited.returncode == 0 and found["balances"] and found["from_start"] and found["finished"]
    assert (found["trained_steps"], found["trained"]) == (5, 40)

    same = asyncrl("rerun", str(run.directory))
    assert same.returncode == 0, same.stderr
    assert "final weights: equal to those of the run, bit for bit" in same.stdout
    original, again = rows(run.directory), rows(run.directory / "rerun-same")
    for name in ("loss/total", "optim/grad_norm", "kl/behavior", "reward/mean", "staleness/mean"):
        assert [row[name] for row in again] == [row[name] for row in original], name

    assert all(1 < row["completion/support_mean"] < 264 for row in original + again)

    other = asyncrl("rerun", str(run.directory), "loss=no_correction", "learner.lr=3e-3", "learner.ranks=1")
    assert other.returncode == 0, other.stderr
    found = re.search(r"final weights: different from the run's, (\S+)% apart, with other (.*)", other.stdout)
    changed = {"loss.preset", "learner.lr", "learner.ranks"}
    assert found and 0 < float(found.group(1)) < 100 and changed <= set(found.group(2).split(", "))
    assert "loss/total run / rerun" in same.stdout and "kl/behavior run / rerun" in other.stdout
    assert "loss/total run / rerun" not in other.stdout and "optim/grad_norm run" not in other.stdout, "of two losses"
    assert "loss/total and optim/grad_norm are left out" in other.stdout
    counterfactual = rows(run.directory / "rerun-loss-no-correction-learner.lr-3e-3-learner.ranks-1")
    assert [row["loss/total"] for row in counterfactual] != [row["loss/total"] for row in original]
    assert all(0 < row["rerun/ess"] <= 1 for row in counterfactual[:-1])

    refused = asyncrl("rerun", str(run.directory), "rollout.group_size=2")
    assert refused.returncode == 2 and "cannot set rollout.group_size" in refused.stderr
