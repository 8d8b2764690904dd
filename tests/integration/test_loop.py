"""The whole loop with real processes: torchrun FSDP2 ranks, Ray workers, the replay server, broadcasts."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.replay.audit.report import main as audit_main
from tests.integration.conftest import LocalRun, StartLocal
from tests.telemetry.traced import assert_run_is_traced

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


@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.long), 4])
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
            "rollout.top_k": 40,
            "learner.steps": steps,
            "eval.every": 4,
            "eval.rows": 32,
            "eval.chunk": 16,
            "telemetry.trace": "true",
        }
    )
    assert run.finish(400) == 0, run.tail()
    assert_run_is_traced(run.directory, ["learner 0", "learner 1", "replay server", "rollout-0", "rollout-1"])
    rows = run.rows()
    assert all(0 <= row["idle/replay"] <= 1 and 0 < row["machine/memory_free"] < 1 for row in rows)
    assert rows[-1]["machine/clock_skew_s"] < 0.01, "of processes of one machine"
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert [row["policy_version"] for row in rows] == list(range(1, steps + 1))
    assert max(row["staleness/max"] for row in rows) <= max_staleness
    # Of tokens of the learner's own version both sides have the same distribution, over the same 40 tokens; but for
    # those of sequences that span an update, whose KV is of the weights before.
    fresh = [row for row in rows if row["staleness/max"] == 0]
    ages = [row["staleness/age_0/rms_log_ratio"] for row in fresh if "staleness/age_0/rms_log_ratio" in row]
    assert ages
    assert all(row["completion/support_mean"] == 40 for row in rows) and max(ages, default=0.0) < 1e-4
    if max_staleness == 0:
        assert all(row["staleness/mean"] == 0 and row["staleness/masked_tokens"] == 0 for row in rows)
    points = run.evaluations()
    assert 2 <= len(points) <= 3 and points[-1]["step"] == steps
    for row in points:
        assert row["eval/heldout/count"] == 32 and 0 <= row["eval/heldout/reward"] <= 1
        assert row["policy_version"] == row["eval/heldout/version_min"] == row["step"]
    kept = run.rows("eval_samples")
    assert [(row["step"], row["row"]) for row in kept] == [(row["step"], n) for row in points for n in range(0, 32, 4)]
    assert all(row["prompt"] and row["tokens"] and row["reward"] <= 1 and row["version_min"] >= 0 for row in kept)
    assert any(row["completion"] for row in kept), "the text of one that is an end token alone is empty"
    for row in rows:
        assert_conserved(row)
    assert_trained_once(ledger(run))
    exported: Any = AutoModelForCausalLM.from_pretrained(run.directory / "hf")
    tokenizer = AutoTokenizer.from_pretrained(run.directory / "hf")
    tokens = exported.generate(**tokenizer("abc>", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert tokens.shape[1] > 4


@pytest.mark.long
def test_a_killed_rollout_worker_costs_nothing_but_time(start_local: StartLocal) -> None:
    run = start_local({"learner.steps": 40, "rollout.workers": 2, "replay.heartbeat_timeout_s": 6})
    run.wait_for_step(5, 300)
    started = (run.directory / "logs" / "rollout-0.log").read_text()
    pid = int(re.findall(r"pid (\d+)", started)[-1])
    assert "ray::RolloutWorker" in " ".join(psutil.Process(pid).cmdline())
    assert psutil.Process(pid).nice() == psutil.Process().nice(), "behind the learner it would starve on the same cores"
    os.kill(pid, signal.SIGKILL)
    assert run.finish(400) == 0, run.tail()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert_conserved(rows[-1])
    assert_trained_once(ledger(run))


@pytest.mark.long
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


def test_a_rank_killed_far_from_its_checkpoint_trains_all_of_it_again_and_a_resume_may_change_the_batch(
    start_local: StartLocal,
) -> None:
    settings = {"rollout.host": "process", "replay.journal.retain": "all"}  # staleness and save_every as shipped
    run = start_local({**settings, "learner.steps": 30})
    run.wait_for_step(14, 300)  # and not many more, or the run would end before anybody is killed
    victims = [p for p in run.descendants("asyncrl.learner") if "LOCAL_RANK" in p.environ()]
    os.kill(victims[0].pid, signal.SIGKILL)
    assert run.finish(400) == 0, run.tail()
    events = ledger(run)
    back = max(i for i, event in enumerate(events) if event["event"] == "restore")
    assert events[back]["next_step"] == 0 and events[back]["again"]
    before = {event["step"]: event["groups"] for event in events[:back] if event["event"] == "trained"}
    after = {event["step"]: event["groups"] for event in events[back:] if event["event"] == "trained"}
    assert len(before) >= 14 and sorted(after) == list(range(30))
    assert {step: after[step] for step in before} == before
    assert not any(event.get("reason") == "stale" for event in events[back:])
    assert max(row["staleness/max"] for row in run.rows()) <= 4

    resumed = start_local(
        {**settings, "learner.steps": 34, "resume": "auto", "learner.groups_per_step": 4, "learner.lr": 2e-3}
    )
    assert resumed.finish(400) == 0, resumed.tail()
    steps = {event["step"]: event["groups"] for event in ledger(resumed) if event["event"] == "trained"}
    assert [len(steps[step]) for step in range(34)] == [8] * 30 + [4] * 4
    said = resumed.output.read_text()
    assert "this resume changes learner.groups_per_step: 8 -> 4" in said
    head = (resumed.directory / "config.yaml").read_text()
    assert "# resumed from step_30: learner.lr: 0.001 -> 0.002" in head
    assert resumed.rows()[-1]["optim/lr"] == 2e-3
    assert audit_main(resumed.directory, as_json=False) == (0, "")
    assert_trained_once(ledger(resumed))


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
