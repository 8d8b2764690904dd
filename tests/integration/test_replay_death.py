"""The replay server and a rollout worker are killed in the middle of a run of several turns, with a mixture, a
curriculum and evaluations: they come back, nothing is lost, and the prompts are those of an undisturbed stream.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from asyncrl.config import JOURNAL_DIR
from asyncrl.drawing.curriculum import Curriculum, Draws
from asyncrl.drawing.turns import Turns
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.state import ReplayState
from asyncrl.replay.journal.recovery import read_journal
from tests.integration.conftest import LocalRun, StartLocal
from tests.integration.test_loop import assert_conserved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENVIRONMENT = """
from asyncrl.environments.chat import ChatEnvironment


class TwoTurns(ChatEnvironment):
    async def episode(self, chat, row):
        if row["kind"] == "hopeless":
            await chat.reply(max_tokens=2)
            return 0.0
        first = await chat.reply(max_tokens=4)
        chat.user("again")
        second = await chat.reply(max_tokens=4)
        return float(first.content < second.content)
"""
ROWS = {"words": 30, "numbers": 18}
WEIGHTS = {"words": 2, "numbers": 1}


def write_rows(path: Path, count: int) -> Path:
    rows = (
        {"prompt": [{"role": "user", "content": f"{path.stem} {n}"}], "kind": "hopeless" if n % 2 else "fair"}
        for n in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def kill_worker(run: LocalRun, name: str) -> None:
    """Kill -9, by what its log says of the newest life."""
    lives = re.findall(r"pid (\d+) start", (run.directory / "logs" / f"{name}.log").read_text())
    os.kill(int(lives[-1]), signal.SIGKILL)


def assert_drawn_as_by_a_server_that_never_died(events: Iterable[ev.Event]) -> None:
    """By a state that hears all events in one life: each new prompt is the one that it would have drawn, none comes
    twice, and the sources have their shares."""
    state, turns, drawn, wanted = ReplayState(), Turns(list(WEIGHTS.values())), [], None
    for event in events:
        if isinstance(event, ev.Snapshotted):
            given = event.run["settings"]["curriculum"]
            wanted = Curriculum(**given | {"weights": tuple(given["weights"])})
            if state.applied:
                continue
        if isinstance(event, ev.Issued) and event.group_id not in state.ledger.entries:
            assert event.prompt_index == state.next_prompt(wanted)
            drawn.append(event.prompt_index)
            assert turns[event.prompt_index][0] == turns[state.cursor][0], "it was another source's turn"
        state.apply(event)
    assert isinstance(state.draws, Draws) and len(set(drawn)) == len(drawn) == state.cursor
    assert sum(state.draws.positions) == state.cursor + state.draws.passed_over
    assert state.draws.passed_over > 0, "the curriculum never chose"


def test_killed_servers_and_workers_lose_no_group_train_none_twice_and_disturb_no_draw(
    start_local: StartLocal, chat_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "two.py").write_text(ENVIRONMENT)
    sources = {f"data.mixture.{name}.path": write_rows(tmp_path / f"{name}.jsonl", n) for name, n in ROWS.items()}
    weights = {f"data.mixture.{name}.weight": weight for name, weight in WEIGHTS.items()}
    run = start_local(
        {
            **sources,
            **weights,
            "data.path": "",
            "data.curriculum": "pass_rate",
            "data.max_prompt_tokens": 64,
            "environment.name": f"{tmp_path}/two.py:TwoTurns",
            "model.path": chat_model,
            "model.renderer": "default",
            "reward.function": "",
            "learner.max_tokens_per_microbatch": 2048,
            "eval.path": write_rows(tmp_path / "heldout.jsonl", 32),
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
    killed = {run.kill("asyncrl.replay", set())}
    step = run.rows()[-1]["step"]
    run.wait_for_step(step + 4, 300)
    kill_worker(run, "rollout-0")
    run.wait_for_step(step + 8, 300)
    killed.add(run.kill("asyncrl.replay", killed))
    assert run.finish(400) == 0, run.tail()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert [row["policy_version"] for row in rows] == list(range(1, 41)), "the learner was restarted"
    assert max(row["staleness/max"] for row in rows) <= 4
    for row in rows:
        assert_conserved(row)
    last = run.evaluations()[-1]
    assert (last["step"], last["eval/heldout/count"]) == (40, 32)
    logs = (run.directory / "logs" / f"rollout-{n}.log" for n in range(2))
    lives = [re.findall(r"start (\d+)", log.read_text()) for log in logs]
    assert lives == [["0", "1"], ["0"]], "a worker that nobody killed was restarted"

    members: dict[int, tuple[int, ...]] = {}
    trained: list[int] = []
    inserted, dropped = set(), set()
    events = [event for _, event in read_journal(run.directory / JOURNAL_DIR)]
    assert_drawn_as_by_a_server_that_never_died(events)
    for event in events:
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
