"""The environments of docs/environments.md in a real run: two turns, and a teacher in place of a reference model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.environments.pages import write_programs
from tests.integration.conftest import StartLocal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def asyncrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_a_teacher_in_the_environment_measures_the_kl_that_its_model_would(
    start_local: StartLocal, tiny_task: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = tmp_path / "teacher"
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_task["model.path"])).save_pretrained(teacher)
    monkeypatch.setenv("TEACHER", str(teacher))
    run = start_local(
        {
            "environment.name": f"{write_programs(tmp_path)}/taught.py:Taught",
            "reference.path": "rollout",
            "loss": "grpo",
            "loss.kl_coef": 0.1,
            "advantage": "reinforce_pp",
            "advantage.kl_coef": 0.05,
            "learner.steps": 3,
            "rollout.host": "process",
            "replay.journal.retain": "all",
        }
    )
    assert run.finish(400) == 0, run.tail()
    audited = json.loads(asyncrl("audit", str(run.directory), "--json").stdout)
    assert audited["balances"] and (audited["trained_steps"], audited["trained"]) == (3, 24)
    samples = run.rows("samples")
    assert samples and all(" | " in row["completion"] for row in samples if row["reward"] < 1.0)

    again = asyncrl("rerun", str(run.directory), f"reference.path={teacher}")
    assert again.returncode == 0, again.stderr
    (folder,) = run.directory.glob("rerun-*")
    by_model = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for name in ("kl/reference", "kl/in_reward", "loss/total"):
        carried, measured = ([row[name] for row in rows] for rows in (run.rows(), by_model))
        assert carried == pytest.approx(measured, rel=1e-3, abs=1e-5), name
    assert all(row["kl/reference"] > 1e-3 for row in by_model)
