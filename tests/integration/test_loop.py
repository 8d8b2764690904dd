"""The whole loop with real processes: torchrun FSDP2 ranks, Ray workers, the replay server, gloo broadcasts."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.conftest import LocalRun, StartLocal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIFE = ("replay/in_flight", "replay/inserted", "replay/leased", "replay/trained")


def assert_conserved(row: dict[str, Any]) -> None:
    dropped = sum(value for key, value in row.items() if key.startswith("replay/dropped_"))
    assert row["replay/admitted"] == sum(row[key] for key in LIFE) + dropped, row


def ledger(run: LocalRun) -> list[dict[str, Any]]:
    return run.rows("ledger")


def assert_trained_once(events: list[dict[str, Any]]) -> None:
    """In the surviving history (a restore undoes the steps after it), no group is in two steps."""
    trained: dict[int, list[int]] = {}
    for event in events:
        if event["event"] == "restore":
            trained = {step: groups for step, groups in trained.items() if step < event["next_step"]}
        if event["event"] == "trained":
            trained[event["step"]] = event["groups"]
    everything = [group for groups in trained.values() for group in groups]
    assert everything, "nothing was trained"
    assert len(everything) == len(set(everything)), "a group was trained in two steps"


@pytest.mark.parametrize("max_staleness", [0, 4])
def test_two_fsdp_ranks_and_two_ray_workers_keep_the_staleness_bound(
    start_local: StartLocal, max_staleness: int
) -> None:
    steps = 8
    run = start_local(
        {
            "replay.max_staleness": max_staleness,
            "replay.pipeline_depth": min(max_staleness, 2),
            "learner.ranks": 2,
            "rollout.workers": 2,
            "learner.steps": steps,
            "eval.every": 4,
            "eval.rows": 32,
            "eval.chunk": 16,
        }
    )
    assert run.finish(400) == 0, run.tail()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert [row["policy_version"] for row in rows] == list(range(1, steps + 1))
    assert max(row["staleness/max"] for row in rows) <= max_staleness
    if max_staleness == 0:
        assert all(row["staleness/mean"] == 0 and row["staleness/masked_tokens"] == 0 for row in rows)
    assert any("eval/heldout/accuracy" in row for row in rows)
    for row in rows:
        assert_conserved(row)
    assert_trained_once(ledger(run))
    exported = AutoModelForCausalLM.from_pretrained(run.directory / "hf")
    tokenizer = AutoTokenizer.from_pretrained(run.directory / "hf")
    tokens = exported.generate(**tokenizer("abc>", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert tokens.shape[1] > 4


def test_a_killed_rollout_worker_costs_nothing_but_time(start_local: StartLocal) -> None:
    run = start_local({"learner.steps": 40, "rollout.workers": 2, "replay.heartbeat_timeout_s": 6})
    run.wait_for_step(5, 300)
    started = (run.directory / "logs" / "rollout-0.log").read_text()
    pid = int(re.findall(r"pid (\d+)", started)[-1])
    assert "ray::RolloutWorker" in " ".join(psutil.Process(pid).cmdline())
    os.kill(pid, signal.SIGKILL)
    assert run.finish(400) == 0, run.tail()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert_conserved(rows[-1])
    assert_trained_once(ledger(run))


def test_a_killed_learner_rank_resumes_from_the_checkpoint(start_local: StartLocal) -> None:
    run = start_local(
        {
            "learner.steps": 40,
            "learner.ranks": 2,
            "learner.save_every": 5,
            "rollout.host": "process",
            "rollout.workers": 1,
        }
    )
    run.wait_for_step(12, 300)
    victims = [p for p in run.descendants("asyncrl.learner") if p.environ().get("LOCAL_RANK") == "1"]
    assert victims, run.tail()
    os.kill(victims[0].pid, signal.SIGKILL)
    assert run.finish(400) == 0, run.tail()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, 41))
    versions = [row["policy_version"] for row in rows]
    assert versions == sorted(set(versions)), "a policy version was reused"
    assert max(row["staleness/max"] for row in rows) <= 4
    assert_conserved(rows[-1])
    assert_trained_once(ledger(run))


def test_a_used_run_folder_is_refused_and_resume_goes_on_with_plain_processes_and_the_files_transport(
    start_local: StartLocal,
) -> None:
    settings = {"rollout.host": "process", "weights.transport": "files"}
    first = start_local({**settings, "learner.steps": 4, "learner.save_every": 2})
    assert first.finish(400) == 0, first.tail()
    refused = start_local({**settings, "learner.steps": 6})
    assert refused.finish(400) != 0
    assert "resume=auto" in refused.output.read_text()
    resumed = start_local({**settings, "learner.steps": 6, "resume": "auto"})
    assert resumed.finish(400) == 0, resumed.tail()
    assert [row["step"] for row in resumed.rows()] == [1, 2, 3, 4, 5, 6]


def test_a_reward_that_raises_drops_groups_with_their_reason(start_local: StartLocal, tmp_path: Path) -> None:
    reward = tmp_path / "flaky.py"
    reward.write_text(
        "def score(completion, row):\n"
        "    if row['prompt'].startswith('a'):\n"
        "        raise ValueError('this row cannot be scored')\n"
        "    return float(len(completion))\n"
    )
    run = start_local(
        {"learner.steps": 6, "rollout.host": "process", "reward.function": f"{reward}:score", "rollout.max_attempts": 2}
    )
    assert run.finish(400) == 0, run.tail()
    rows = run.rows()
    assert rows[-1]["replay/dropped_failed_reward"] > 0
    assert_conserved(rows[-1])
