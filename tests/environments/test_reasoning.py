"""Tasks of reasoning-gym: each entry can be made again from its row, and its own answer gets the best score."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from asyncrl.environments.reasoning.environment import ASK, ReasoningGym
from tests.environments.talk import TOKENIZER, exact, play

pytestmark = pytest.mark.slow

EVERY_TASK = """
import json, sys
from asyncrl.environments.reasoning.rows import rows
from asyncrl.environments.reasoning.tasks import _dataset, names, score

wrong = []
for row in rows(names(), 2, 7, {}):
    given = json.loads(json.dumps(row))["reasoning_gym"]
    _dataset.cache_clear()  # as in the process that scores: made again from the row
    task = {**given, "config": json.dumps(given["config"])}
    best = score(**task, reply=f"Hm. <answer>{row['answer']}</answer>", tagged=True)
    none = score(**task, reply="no idea", tagged=True)
    if row["answer"] and not (0.0 <= none < best <= 1.0):
        wrong.append((given["task"], best, none))
print("\\n" + json.dumps(wrong))
"""


@pytest.mark.unhurried
@pytest.mark.timeout(1200)
def test_every_task_knows_its_own_answer_when_it_is_made_again() -> None:
    done = subprocess.run([sys.executable, "-c", EVERY_TASK], capture_output=True, text=True, check=True, timeout=1100)
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "asyncrl.environments.reasoning.rows",
        "basic_arithmetic",
        "--size",
        "3",
        "--seed",
        "5",
    ]
    rows = subprocess.run(command, capture_output=True, text=True, check=True, timeout=150).stdout.splitlines()
    assert len({json.loads(each)["prompt"][0]["content"] for each in rows}) == 3
    return json.loads(rows[2])


async def test_an_episode_is_scored_by_its_task_in_another_process(row: dict[str, Any]) -> None:
    gym = ReasoningGym(timeout_s=120.0)
    try:
        given = {"prompt": row["prompt"], "columns": row}
        right, engine = await play(gym, [f"Well. <answer>{row['answer']}</answer>"], **given, size=2)
        assert [each.reward for each in right.trajectories] == [1.0, 1.0]
        assert ASK in TOKENIZER.decode(engine.requests[0].prompt_ids.tolist())
        exact(right, engine)
        wrong, _ = await play(gym, [f"It is {row['answer']}."], **given)
        assert wrong.trajectories[0].reward == 0.0
        strange = {**row, "reasoning_gym": {**row["reasoning_gym"], "task": "chess"}}
        failed, _ = await play(gym, ["x"], prompt=row["prompt"], columns=strange)
        assert "reasoning-gym has no task 'chess'" in str(failed.failures[0])
        failed, _ = await play(gym, ["x"], prompt="hi")
        assert "the row has no column 'reasoning_gym'" in str(failed.failures[0])
    finally:
        gym.close()


def test_a_task_that_does_not_exist_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "asyncrl.environments.reasoning.rows", "chess"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 2 and "has no task 'chess'. It has: " in done.stderr
