"""Environment `tools`: what the policy is shown, what calls return, and that no call harms others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.environments.chat import ChatEnvironment
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.tools.environment import Tools
from asyncrl.environments.tools.host import Toolbox
from asyncrl.environments.tools.schema import CallFault, tool_of
from asyncrl.environments.tools.sessions import Functions
from asyncrl.errors import ConfigError, EpisodeError
from tests.environments import toolset
from tests.environments.talk import TOKENIZER, call, exact, play, sampled_texts

HERE = f"{Path(__file__).with_name('toolset.py')}"
NAMES = [f"{HERE}:{name}" for name in ("add", "later", "fail", "Counter")]


one_loop = pytest.mark.asyncio(loop_scope="module")
"""One host serves all that have it, and its sessions belong to one loop."""


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    made = Tools(functions=NAMES, timeout_s=20.0, max_calls=6, max_calls_per_turn=4, max_turns=4, max_result=100)
    yield made
    made.close()


def functions_of(tools: Tools) -> Functions:
    (source,) = tools._sources
    assert isinstance(source, Functions)
    return source


def observed(engine: Any, turn: int = 1) -> str:
    """What was said to the policy before its turn `turn`."""
    text = TOKENIZER.decode(engine.requests[turn].prompt_ids.tolist())
    return text.rpartition("<|im_start|>user")[2].partition("<|im_end|>")[0]


def test_what_the_policy_is_told_is_made_of_types_and_docstrings() -> None:
    spec = tool_of(toolset.add, "here").spec["function"]
    assert (spec["name"], spec["description"]) == ("add", "Add two numbers, or list them.")
    assert spec["parameters"] == {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "a": {"type": "integer", "description": "The first."},
            "b": {"type": "integer", "default": 1, "description": "The second, which may be left out."},
            "kind": {"type": "string", "enum": ["sum", "list"], "default": "sum"},
        },
        "required": ["a"],
    }


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("untyped", "parameter a has no type. Write one"),
        ("silent", "has no docstring"),
        ("starred", "takes \\*numbers"),
        ("strange", "has a type that cannot be described to the policy"),
        ("nothing", "has no 'nothing'"),
    ],
)
def test_a_function_that_nobody_can_be_told_of_is_refused_with_the_way_out(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Toolbox([f"{HERE}:{name}"])


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("6 * (3 + 4)", "42"),
        (" -7 // 2", "-4"),
        ("1/4", "0.25"),
        ("2**9999", "only numbers, + - "),
        ("exit()", "only numbers"),
        ("True + 1", "only numbers"),
        ("1 +", "is no arithmetic"),
        ("1/0", "ZeroDivisionError"),
        ("9" * 201, "at most 200 letters"),
    ],
)
def test_the_calculator_that_ships_works_out_arithmetic_and_nothing_else(expression: str, says: str) -> None:
    box = Toolbox(["asyncrl.environments.tools.calculator:calculate"])
    done, said = box.call("calculate", {"expression": expression})
    assert says in said and done == (not said.startswith("Error"))


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools named add"):
        Toolbox([f"{HERE}:add", f"{HERE}:add"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({}, "a: Field required"), ({"a": "x"}, "a: .*integer"), ({"a": 1, "c": 2}, "c: Extra inputs are not permitted")],
)
def test_wrong_arguments_are_told_to_the_policy(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(CallFault, match=says):
        tool_of(toolset.add, "here").checked(arguments)


@one_loop
async def test_calls_are_answered_side_by_side_in_order_and_the_last_reply_is_scored(tools: Tools) -> None:
    turns = [f"{call('add', a=20, b=22)}\n{call('later', text='soon')}", "It is 42."]
    episodes, engine = await play(tools, turns, columns={"answer": "42"}, size=2)
    assert [each.reward for each in episodes.trajectories] == [1.0, 1.0]
    text = observed(engine)
    assert text.index("42") < text.index("soon!")
    assert "Add two numbers" in TOKENIZER.decode(engine.requests[0].prompt_ids.tolist())
    assert sampled_texts(episodes) == [f"{turn}<|im_end|>" for turn in turns]
    exact(episodes, engine)


@one_loop
async def test_an_object_of_a_class_is_that_of_one_episode(tools: Tools) -> None:
    turns = [f"{call('step', by=2)}\n{call('step', by=3)}", call("step", by=5), "done"]
    _, engine = await play(tools, turns, size=3)
    assert "10" in observed(engine, -1), "its count goes on over turns, and begins anew in each episode"


@one_loop
async def test_what_goes_wrong_is_told_to_the_policy(tools: Tools) -> None:
    first = "\n".join(
        [call("add", a="x"), call("sub", a=1), "<tool_call>\n{nonsense\n</tool_call>", call("fail", how="x")]
    )
    episodes, engine = await play(tools, [first, call("fail", how="long"), "well"], columns={"answer": "well"})
    assert episodes.trajectories[0].reward == 1.0
    told = observed(engine)
    for said in (
        "Error: wrong arguments: a",
        "there is no tool 'sub'. There are: add",
        "cannot be read",
        "OSError: no such",
    ):
        assert said in told
    assert "9900 letters left out" in observed(engine, 2)


@one_loop
async def test_half_a_letter_in_what_a_tool_says_is_told_as_a_question_mark(tools: Tools) -> None:
    episodes, engine = await play(tools, [call("fail", how="half a letter"), "well"], columns={"answer": "well"})
    assert "OSError: half of ?" in observed(engine) and not episodes.failures


@one_loop
async def test_budgets_of_a_turn_of_an_episode_and_of_turns(tools: Tools) -> None:
    many = "\n".join([call("add", a=1)] * 5)
    episodes, engine = await play(tools, [many, many, "ok", "never"], columns={"answer": "ok"})
    assert observed(engine).count("no more calls") == 1
    assert observed(engine, 2).count("no more calls") == 4, "5 were asked for in the first turn, which counts"
    assert episodes.trajectories[0].reward == 1.0
    for_ever, engine = await play(tools, lambda text: call("add", a=1), columns={"answer": "ok"})
    assert len(engine.requests) == 4 and for_ever.trajectories[0].reward == 0.0


@pytest.mark.parametrize(("how", "says"), [("segfault", "ended its process"), ("exit", "ended its process")])
@one_loop
async def test_a_tool_that_ends_its_process_is_one_result(tools: Tools, how: str, says: str) -> None:
    episodes, engine = await play(tools, [f"{call('fail', how=how)}\n{call('add', a=41)}", "ok"])
    assert says in observed(engine) and "42" in observed(engine)
    assert len(episodes.trajectories) == 1


@one_loop
async def test_a_session_that_ended_early_is_not_killed_again_when_its_number_may_be_a_stranger_s(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, kill = [], os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, number: (killed.append(group), kill(group, number)))
    session = await functions_of(tools).host.open()
    done, _ = await session.call("fail", {"how": "exit"}, 60.0)
    session.kill()
    assert not done and len(killed) == 1


@one_loop
async def test_a_tool_that_hangs_is_killed_with_all_that_it_started(tools: Tools) -> None:
    before = set(psutil.Process().children(recursive=True))
    functions = functions_of(tools)
    functions.timeout_s, usual = 2.0, functions.timeout_s
    try:
        _, engine = await play(tools, [call("fail", how="loop"), "ok"])
    finally:
        functions.timeout_s = usual
    assert "took longer than 2 s and was ended" in observed(engine)
    async with asyncio.timeout(60):  # it was told to end, and may take its time
        while [each for each in set(psutil.Process().children(recursive=True)) - before if _loops(each)]:
            await asyncio.sleep(0.02)


def _loops(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) and process.ppid() != os.getpid()
    except psutil.NoSuchProcess:
        return False


@pytest.mark.asyncio(loop_scope="function")
async def test_a_host_that_was_lost_is_started_anew() -> None:
    tools = Tools(functions=NAMES[:1])
    try:
        process = functions_of(tools).host._process
        assert process is not None
        process.kill()
        process.wait()
        episodes, _ = await play(tools, [call("add", a=41), "42"], columns={"answer": "42"})
        assert episodes.trajectories[0].reward == 1.0
    finally:
        tools.close()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "has no tools. Name functions"),
        ({"functions": "a.py:b"}, "functions must be a list"),
        ({"functions": ["a.py:b"], "max_turns": 0}, "max_turns must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Tools(**args)


@one_loop
async def test_a_rows_own_tools_are_refused_where_nobody_calls_them_and_told_elsewhere(
    tools: Tools,
) -> None:
    own = {"tools": [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]}
    with pytest.raises(EpisodeError, match=r"tested: the row's own `tools` cannot be called"):
        await play(tools, ["done"], columns=own)

    class Talk(ChatEnvironment):
        async def episode(self, chat: Conversation, row: dict[str, Any]) -> float:
            return float((await chat.reply()).content == "done")

    _, engine = await play(Talk(), ["done"], columns=own)
    assert "look_up" in TOKENIZER.decode(engine.requests[0].prompt_ids.tolist())
