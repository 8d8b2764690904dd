"""`environment.name=verifiers`: a taskset with a tool server, as in verifiers' documentation, and its harness."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers.v1", reason="needs the extra `verifiers`")

from asyncrl.environments.probe import check_environment
from asyncrl.environments.verifiers import host, hosted
from asyncrl.environments.verifiers.environment import Verifiers
from asyncrl.environments.verifiers.host import Host, built
from asyncrl.environments.verifiers.hosted import Hosted
from asyncrl.environments.verifiers.rows import rows
from asyncrl.errors import ConfigError, EpisodeError
from asyncrl.schema import EnvironmentConfig
from asyncrl.utils.process_tree import is_alive, process_at
from tests.environments.talk import TOKENIZER, Scripted, call, exact, play, sampled_texts

pytestmark = pytest.mark.slow  # all of it, for the seconds that the import above takes
FOLDER = str(Path(__file__).with_name("tasksets"))
ARGS: dict[str, Any] = {"taskset": "addition_v1", "harness": "null", "path": FOLDER, "uv": False}


def row(place: int) -> dict[str, Any]:
    return {"verifiers": {"idx": place, "prompt": f"What is {place} + {place}?", "answer": 2 * place}}


@pytest.mark.timeout(600)
async def test_a_taskset_with_a_tool_server_runs_as_it_is_and_is_trained_on_what_was_sampled() -> None:
    addition = Verifiers(**ARGS, max_calls=3)
    try:
        await solves_with_a_tool(addition)
        await ends_are_outcomes_and_failures_have_their_reason(addition)
        await a_process_that_ends_fails_its_episodes_and_another_takes_its_place(addition)
    finally:
        await addition.close()


async def solves_with_a_tool(addition: Verifiers) -> None:
    turns = [call("sums_add", a=21, b=21), "42"]
    episodes, engine = await play(addition, turns, columns=row(21), size=2)
    assert not episodes.failures
    assert sampled_texts(episodes) == [f"{turn}<|im_end|>" for turn in turns]
    for trajectory in episodes.trajectories:
        assert trajectory.reward == 1.0 and trajectory.rewards == {"exact_match": 1.0, "turns": 2.0}
        assert set(trajectory.policy_versions[trajectory.loss_mask].tolist()) == {engine.version}
    read = TOKENIZER.decode(engine.requests[-1].prompt_ids.tolist())
    assert "What is 21 + 21?" in read and "Add two numbers." in read and "<tool_response>\n42\n</tool_response>" in read
    exact(episodes, engine)


async def ends_are_outcomes_and_failures_have_their_reason(addition: Verifiers) -> None:
    wrong, _ = await play(addition, ["43"], columns=row(21))
    assert [each.reward for each in wrong.trajectories] == [0.0]
    endless, _ = await play(addition, [call("sums_add", a=1, b=place) for place in range(4)], columns=row(1))
    (cut,) = endless.trajectories
    assert cut.reward == 0.0 and len(sampled_texts(endless)) == 3, "environment.args.max_calls ended it"
    engine = Scripted(lambda text: call("sums_add", a=1, b=1))
    engine.max_length = 700
    full, _ = await play(addition, None, engine=engine, columns=row(1))
    assert [(each.reward, each.finish_reason) for each in full.trajectories] == [(0.0, "length")]
    odd, _ = await play(addition, ["1"], columns={"verifiers": {"prompt": "?"}})
    assert "ValidationError" in str(odd.failures[0]) and "answer" in str(odd.failures[0])
    none, _ = await play(addition, ["1"])
    assert "has no column 'verifiers' with a task" in str(none.failures[0])


async def a_process_that_ends_fails_its_episodes_and_another_takes_its_place(addition: Verifiers) -> None:
    def ends(text: str) -> str:
        process = addition._hosted._process
        assert process is not None and process.stdin is not None
        process.stdin.close()
        time.sleep(2)  # of the engine's: nobody may answer before it is gone
        return "4"

    lost, _ = await play(addition, ends, columns=row(2))
    assert "the process of verifiers ended" in str(lost.failures[0]), lost.failures
    again, _ = await play(addition, ["4"], columns=row(2))
    assert [each.reward for each in again.trajectories] == [1.0]


async def test_an_episode_that_goes_wrong_in_any_way_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker waits for an answer, and for nothing else."""
    monkeypatch.syspath_prepend(FOLDER)
    asked = Host(built({"taskset": "addition-v1", "harness": "", "env": {}, "uv": True}))

    async def cancelled(self: Host, asked: dict[str, Any]) -> Any:
        raise asyncio.CancelledError("by a scope of the taskset's")

    async def done(self: Host, asked: dict[str, Any]) -> Any:
        return None

    read, write = os.pipe()
    with open(read) as answers:
        for episode, says in ((cancelled, "CancelledError: by a scope"), (done, "TypeError: float()")):
            monkeypatch.setattr(Host, "_episode", episode)
            monkeypatch.setattr(host, "outcome_of", lambda episode: {"score": 1.0, "parts": {"seen": object()}})
            asked._running[7] = asyncio.current_task()  # pyright: ignore[reportArgumentType]
            await asked._answer({"id": 7}, write)
            said = json.loads(answers.readline())
            assert said["id"] == 7 and said["error"].startswith(says)
    os.close(write)


@pytest.mark.parametrize(("said", "times"), [(b"no answer", 1), (b"1", 1 << 18)])
async def test_what_is_no_answer_fails_the_episodes_that_wait(said: bytes, times: int) -> None:
    program = f"import time; print({said!r}.decode() * {times}, flush=True); time.sleep(600)"
    hosted, pipe = Hosted({}, ""), asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=pipe, stdout=pipe)
    hosted._process, hosted._reading = process, asyncio.create_task(hosted._read(process))
    with pytest.raises(EpisodeError, match="the process of verifiers ended"):
        await asyncio.wait_for(hosted.run({}), 60.0)
    await hosted.close()


SLOW = """import json, pathlib, sys, time
with pathlib.Path(__file__).with_name("starts").open("a") as file:
    file.write("x")
while not pathlib.Path(__file__).with_name("go").exists():
    time.sleep(0.01)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    print(json.dumps({"id": json.loads(line)["id"], "score": 1.0, "parts": {}}), flush=True)
"""


LEAVES = """import json, subprocess, sys
sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleeps, start_new_session=True, stdout=subprocess.DEVNULL)
print(json.dumps({"ready": True}), flush=True)
asked = json.loads(sys.stdin.readline())
print(json.dumps({"id": asked["id"], "score": float(child.pid), "parts": {}}), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("killed", [True, False])
async def test_what_an_environment_started_does_not_outlive_its_process(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving_host.py").write_text(LEAVES)
    monkeypatch.setattr(hosted, "MODULE", "leaving_host")
    process = Hosted({}, str(tmp_path))
    try:
        child = process_at(int((await process.run({}))["score"]))
        assert child is not None and is_alive(child)
        if killed:
            assert process._process is not None
            process._process.kill()
            async with asyncio.timeout(60):
                while is_alive(child):
                    await asyncio.sleep(0.01)
    finally:
        await process.close()
    assert not is_alive(child)


async def test_a_start_goes_on_when_the_episode_that_began_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended with it, a process that starts more slowly than an episode may take would never be there."""
    (tmp_path / "slow_host.py").write_text(SLOW)
    monkeypatch.setattr(hosted, "MODULE", "slow_host")
    process = Hosted({}, str(tmp_path))
    try:
        first = asyncio.create_task(process.run({}))
        async with asyncio.timeout(60):
            while not (tmp_path / "starts").exists():
                await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first])
        (tmp_path / "go").touch()
        said = await asyncio.wait_for(process.run({}), 60)
        assert first.cancelled() and said["score"] == 1.0
        assert (tmp_path / "starts").read_text() == "x"
    finally:
        await process.close()


def test_rows_are_the_tasks_with_what_they_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    settings = {"taskset": "addition-v1", "harness": "", "env": {"taskset": {"num_tasks": 3}}, "uv": True}
    made = list(rows(built(settings).taskset, None))
    assert [each["prompt"] for each in made][:2] == [
        [{"role": "user", "content": f"What is {n} + {n}?"}] for n in range(2)
    ]
    assert len(made) == 3 and made[2]["verifiers"]["answer"] == 4 and made[2]["data_source"] == "addition-v1"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "has no taskset. Name a package"),
    (ARGS | {"path": "nowhere"}, "environment.args.path=nowhere is not a folder"),
    (ARGS | {"max_calls": 0}, "environment.args.max_calls must be above 0"),
    (ARGS | {"taskset": "chess_v1"}, "taskset 'chess_v1' not found"),
    (ARGS | {"harness": "chess"}, "harness 'chess' not found"),
    (ARGS | {"env": {"taskset": {"sums": 3}}}, "sums"),
    (ARGS | {"env": {"id": "best_of_n"}}, "is an environment of several agents"),
]


@pytest.mark.parametrize("place", range(len(REFUSED)))
def test_what_verifiers_would_refuse_is_refused(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    args, says = REFUSED[place]
    with pytest.raises(ConfigError) as refused:
        Verifiers.check(**args)
    assert says in str(refused.value)


@pytest.mark.timeout(300)
def test_a_start_asks_in_a_process_of_its_own() -> None:
    check_environment(EnvironmentConfig(name="verifiers", args=ARGS | {"env": {"agent": {"max_turns": 4}}}))
