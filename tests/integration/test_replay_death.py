"""The replay server is killed in the middle of a run: it comes back at the same address and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from asyncrl.config import JOURNAL_DIR
from asyncrl.replay.core import events as ev
from asyncrl.replay.journal.recovery import read_journal
from tests.integration.conftest import LocalRun, StartLocal
from tests.integration.test_loop import assert_conserved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def kill_replay(run: LocalRun, before: set[int]) -> int:
    """Kill -9 the server that is not among those killed `before`."""
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        for process in run.descendants("asyncrl.replay"):
            if process.pid not in before:
                os.kill(process.pid, signal.SIGKILL)
                return process.pid
        time.sleep(0.1)
    pytest.fail(f"no replay server is running:\n{run.tail()}")


def test_a_replay_server_killed_twice_loses_no_group_and_trains_none_twice(start_local: StartLocal) -> None:
    run = start_local(
        {
            "learner.steps": 40,
            "learner.save_every": 10,
            "rollout.host": "process",
            "rollout.workers": 2,
            "eval.every": 10,
            "eval.rows": 32,
            "eval.chunk": 16,
            "replay.journal.retain": "all",
        }
    )
    run.wait_for_step(8, 300)
    killed = {kill_replay(run, set())}
    step = run.rows()[-1]["step"]
    run.wait_for_step(step + 8, 300)
    killed.add(kill_replay(run, killed))
    assert run.finish(400) == 0, run.tail()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert [row["policy_version"] for row in rows] == list(range(1, 41)), "the learner was restarted"
    assert max(row["staleness/max"] for row in rows) <= 4
    for row in rows:
        assert_conserved(row)
    last = run.evaluations()[-1]
    assert (last["step"], last["eval/heldout/count"]) == (40, 32)
    starts = [log.read_text().count("start 0") for log in (run.directory / "logs").glob("rollout-*.log")]
    assert starts == [1, 1], "a worker was restarted"

    members: dict[int, tuple[int, ...]] = {}
    trained: list[int] = []
    inserted, dropped = set(), set()
    for _, event in read_journal(run.directory / JOURNAL_DIR):
        match event:
            case ev.Sealed():
                members[event.step] = event.members
            case ev.Trained():
                trained += members[event.step]
            case ev.Inserted():
                inserted.add(event.header.group_id)
            case ev.Dropped():
                dropped.add(event.group_id)
    assert len(trained) == len(set(trained)) == 40 * 8, "a group was trained twice, or a step was short"
    assert inserted <= set(trained) | dropped, "an acknowledged group is in no step and was not dropped"
    seen = [json.loads(line) for line in (run.directory / "ledger.jsonl").read_text().splitlines()]
    in_ledger = [group for row in seen if row["event"] == "trained" for group in row["groups"]]
    assert in_ledger == trained
