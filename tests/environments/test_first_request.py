"""Lengths, checks and samples are those of the environment's first request, not of the row's own prompt."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.chat.base import Message
from asyncrl.environments.chat import ChatEnvironment
from asyncrl.environments.first_request import first_requests
from asyncrl.environments.tools.schema import tool_of
from asyncrl.errors import DataError, OverlongError
from asyncrl.schema import EnvironmentConfig, ModelConfig
from tests.chat.markers import save
from tests.environments import toolset
from tests.environments.talk import CHAT, TOKENIZER, play

QWEN3 = (Path(__file__).parents[1] / "chat" / "qwen3.jinja").read_text()
ROW = {"prompt": [{"role": "user", "content": "how many?"}], "answer": "2"}
OWN = """
import httpx
from asyncrl.environments.chat import ChatEnvironment
class Talk(ChatEnvironment):
    async def episode(self, chat, row):
        chat.system("Be brief, " + row["answer"])
        reply = await chat.reply()
        return 1.0
class Silent(ChatEnvironment):
    async def episode(self, chat, row):
        return 1.0
async def agent(base_url, api_key, model, row):
    async with httpx.AsyncClient(timeout=30) as client:
        messages = [{"role": "system", "content": "S"}, {"role": "user", "content": row["answer"]}]
        await client.post(
            f"{base_url}/chat/completions",
            headers={"authorization": f"Bearer {api_key}"},
            json={"model": model, "messages": messages},
        )
"""


class Briefed(ChatEnvironment):
    async def episode(self, chat: Any, row: dict[str, Any]) -> float:
        chat.system("Be brief.")
        await chat.reply()
        return 1.0


@pytest.mark.asyncio
async def test_the_prompt_of_a_sample_is_the_first_request() -> None:
    made, engine = await play(Briefed(), ["yes"], prompt="hi")
    assert made.prompt_text == TOKENIZER.decode(engine.requests[0].prompt_ids.tolist())
    assert "Be brief." in made.prompt_text and made.prompt_text.endswith("<|im_start|>assistant\n")
    assert len(made.trajectories) == 1


@pytest.mark.asyncio
async def test_a_first_request_that_is_too_long_is_dropped_or_an_error_as_a_prompt_is() -> None:
    _, engine = await play(Briefed(), ["yes"], prompt="hi")
    length = len(engine.requests[0].prompt_ids)
    made, _ = await play(Briefed(), ["yes"], prompt="hi", max_prompt_tokens=length)
    assert len(made.trajectories) == 1
    said = f"first request has {length} tokens, the limit is {length - 1}"
    with pytest.raises(OverlongError, match=said):
        await play(Briefed(), ["yes"], prompt="hi", max_prompt_tokens=length - 1)
    with pytest.raises(DataError, match=said) as found:
        await play(Briefed(), ["yes"], prompt="hi", max_prompt_tokens=length - 1, overlong="error")
    assert not isinstance(found.value, OverlongError)


def wanted(*messages: Message, tools: Any = ()) -> tuple[int, str]:
    ids = CHAT.render([*messages], tools)
    return len(ids), TOKENIZER.decode(ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tools", "search", "own", "openai", "silent"])
def test_an_environment_is_asked_for_its_first_request_before_the_start(name: str, tmp_path: Path) -> None:
    save(tmp_path, template=QWEN3)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "a"}\n')
    user, answer = ROW["prompt"][0], {"role": "user", "content": "2"}
    tool = tool_of(toolset.add, "here").spec
    config, expected = {
        "tools": (
            EnvironmentConfig(name="tools", args={"functions": [f"{toolset.__file__}:add"], "system": "S"}),
            [wanted({"role": "system", "content": "S"}, user, tools=[tool])],
        ),
        "search": (
            EnvironmentConfig(name="search", args={"corpus": str(tmp_path / "corpus.jsonl"), "system": "S"}),
            [wanted({"role": "system", "content": "S"}, user)],
        ),
        "own": (
            EnvironmentConfig(name=f"{tmp_path}/own.py:Talk"),
            [wanted({"role": "system", "content": "Be brief, 2"}, user)],
        ),
        "openai": (
            EnvironmentConfig(name="openai", args={"agent": f"{tmp_path}/own.py:agent"}),
            [wanted({"role": "system", "content": "S"}, answer)],
        ),
        "silent": (EnvironmentConfig(name=f"{tmp_path}/own.py:Silent"), []),
    }[name]
    assert first_requests(config, ModelConfig(path=str(tmp_path)), [ROW]) == expected


def test_what_an_environment_starts_for_its_first_request_ends_with_it(tmp_path: Path) -> None:
    save(tmp_path, template=QWEN3)
    (tmp_path / "own.py").write_text(
        "import pathlib, subprocess, sys\n"
        "from asyncrl.environments.chat import ChatEnvironment\n"
        "class Boxed(ChatEnvironment):\n"
        "    def __init__(self):\n"
        "        command = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "        box = subprocess.Popen(command, start_new_session=True)\n"
        "        pathlib.Path(__file__).with_name('pid').write_text(str(box.pid))\n"
        "    async def episode(self, chat, row):\n"
        "        await chat.reply()\n"
        "        return 1.0\n"
    )
    config = EnvironmentConfig(name=f"{tmp_path}/own.py:Boxed")
    assert len(first_requests(config, ModelConfig(path=str(tmp_path)), [ROW])) == 1
    box = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 30.0
    while psutil.pid_exists(box) and psutil.Process(box).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "it outlived the environment"
        time.sleep(0.05)
