"""Environment `python`: how the policy writes programs, what it reads, and that their output is not trained on."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from asyncrl.environments.tools import interpreter
from asyncrl.environments.tools.interpreter import Python
from asyncrl.errors import ConfigError, SandboxError
from asyncrl.sandbox import running
from asyncrl.sandbox.level import Level
from tests.environments.talk import TOKENIZER, call, exact, play, sampled_texts
from tests.environments.test_tools import observed

if why := running.unavailable(Level.NAMESPACES):
    pytest.skip(f"this machine has no namespaces: {why}", allow_module_level=True)

PROGRAM = "x = 6\nprint('six')\nx * 7"
WRITTEN = {
    "tool": [call("python", code=PROGRAM), "It is 42."],
    "block": [f"Let me see.\n```python\n{PROGRAM}\n```", "It is 42."],
    "tag": [f"Let me see.\n<code>\n{PROGRAM}\n</code>", "It is 42."],
}


def before(engine: Any, turn: int) -> str:
    """All that the policy has read, and written, before its turn `turn`."""
    return TOKENIZER.decode(engine.requests[turn].prompt_ids.tolist())


@pytest.mark.parametrize("how", WRITTEN)
async def test_output_is_read_and_not_trained_on_and_what_was_sampled_is_the_loss(how: str) -> None:
    turns = WRITTEN[how]

    def policy(text: str) -> str:
        return turns[int("six\n42" in text)]

    episodes, engine = await play(Python(call=how), policy, columns={"answer": "42"}, size=2)

    assert [each.reward for each in episodes.trajectories] == [1.0, 1.0]
    assert before(engine, 1).count("six\n42") == 1
    first = turns[0] if how == "tag" else f"{turns[0]}<|im_end|>"
    assert sampled_texts(episodes) == [first, f"{turns[1]}<|im_end|>"]
    exact(episodes, engine)


async def test_a_tag_is_answered_in_the_turn_in_which_it_stands() -> None:
    turns = iter(["<code>print(1)</code>", "so <code>print(2)</code>", "two"])
    _, engine = await play(Python(call="tag"), lambda _: next(turns))
    said = before(engine, 2).rpartition("<|im_start|>assistant\n")[2]
    assert "<interpreter>\n1\n</interpreter>\nso <code>print(2)</code>\n<interpreter>\n2\n</interpreter>\n" in said
    assert engine.requests[0].sampling.stop == ("</code>",)


async def test_only_blocks_of_python_are_run_and_those_of_one_reply_together() -> None:
    two = "```python\na = 20\n```\nand\n```py\na + 22\n```\n"
    _, engine = await play(Python(call="block"), [two, "```json\n{}\n```"])
    assert "```output\n42\n```" in observed(engine) and len(engine.requests) == 2


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("def f():\n    return 1 / 0\nf()", "ZeroDivisionError: division by zero"),
        ("print('before')\nimport sys; sys.exit(3)", "before\nError: it ended with exit code 3"),
        ("if True print()", "SyntaxError: "),
        ("x = 1", "[nothing was printed]"),
        ("open('/etc/shadow')", "FileNotFoundError"),
        ("'\ud800' + chr(33)", "?!"),
        ("print('<|im' + '_end|>')", "<\u200b|im_end|>"),
        ("print('y' * 5000)", "4700 letters left out"),
        (" ", "Error: there is no program"),
    ],
)
async def test_what_becomes_of_a_program_is_told(program: str, says: str) -> None:
    _, engine = await play(Python(max_result=300), [call("python", code=program), "ok"])
    assert says in observed(engine)
    assert "main.py" not in observed(engine), "frames of ours mean nothing to the policy"


async def test_wrong_arguments_and_other_tools_are_told() -> None:
    calls = "\n".join([call("python", program="1"), call("python", code=1), call("bash", code="ls")])
    _, engine = await play(Python(), [calls, "ok"])
    assert observed(engine).count("python takes 'code', a text, and nothing else") == 2
    assert "there is no tool 'bash'. There are: python" in observed(engine)


async def test_a_program_without_end_is_ended_and_told() -> None:
    _, engine = await play(Python(timeout_s=1.0), [call("python", code="import time; time.sleep(600)"), "ok"])
    assert "Error: it took longer than 1 s and was ended" in observed(engine)


async def test_programs_of_a_turn_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = threading.Barrier(2)

    def meets(*arguments: Any, **settings: Any) -> Any:
        meeting.wait(60)
        return run(*arguments, **settings)

    run = interpreter.run
    monkeypatch.setattr(interpreter, "run", meets)
    many = "\n".join([call("python", code="print(41 + 1)"), call("python", code="print(6 * 9)")])
    _, engine = await play(Python(), [many, "ok"])
    assert "42" in observed(engine) and "54" in observed(engine)


async def test_budgets_of_a_turn_of_an_episode_and_of_turns() -> None:
    many = "\n".join([call("python", code="1")] * 3)
    python = Python(max_calls=3, max_calls_per_turn=2, max_turns=3)
    episodes, engine = await play(python, lambda _: many)
    assert [observed(engine, turn).count("no more calls") for turn in (1, 2)] == [1, 3]
    assert len(engine.requests) == 3 and len(episodes.trajectories) == 1


async def test_a_sandbox_that_fails_is_a_failed_episode_and_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise SandboxError("the watcher was ended")

    monkeypatch.setattr(interpreter, "run", lost)
    episodes, _ = await play(Python(), [call("python", code="1"), "ok"], size=2)
    assert not episodes.trajectories
    assert [str(each) for each in episodes.failures] == [
        "the sandbox could not run a program: the watcher was ended"
    ] * 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"isolation": "none"}, "isolation must be namespaces or rlimits; got 'none'. Programs never run without any"),
        ({"call": "shell"}, "call must be one of tool, block, tag; got 'shell'"),
        ({"timeout_s": 0}, "timeout_s must be above 0"),
        ({"max_result": 0}, "max_result must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Python(**args)


def test_a_machine_without_namespaces_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "unavailable", lambda level: "unshare: not permitted")
    with pytest.raises(ConfigError, match=r"by namespaces: unshare.*Or environment\.args\.isolation=rlimits"):
        Python()


def test_little_isolation_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Python(isolation="rlimits")
    assert "run as your user, with access to your files and network" in caplog.text
