"""Environments of several turns in a real run: a chat template, real workers, tools in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.telemetry.metrics.log import SAMPLES_FILE
from tests.integration.conftest import StartLocal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENVIRONMENT = """
from asyncrl.environments.chat import ChatEnvironment


class TwoTurns(ChatEnvironment):
    def __init__(self, answer: str):
        self.answer = answer

    async def episode(self, chat, row):
        first = await chat.reply(max_tokens=4)
        chat.user(self.answer)
        second = await chat.reply(max_tokens=4)
        chat.reward(0.25, name="patience")
        return float(len(first.content) > len(second.content))
"""
AGENT = """
import openai


def run(base_url, api_key, model, row):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = list(row["prompt"])
    for _ in range(2):
        completion = client.chat.completions.create(model=model, messages=messages, max_tokens=4)
        said = completion.choices[0].message
        messages += [said, {"role": "user", "content": "again"}]
    # A conversation of its own: a branch of this episode.
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": "judge"}], max_tokens=4)
    return {"score": float(len(said.content) % 2), "patience": 0.25}
"""
TOOLS = '''
def look_up(word: str) -> str:
    """What a word means.

    Args:
        word: In small letters.
    """
    return word[::-1]
'''


@pytest.mark.parametrize("kind", ["conversation", pytest.param("tools", marks=pytest.mark.long), "openai"])
def test_a_run_of_several_turns_trains_what_was_sampled_alone(
    start_local: StartLocal, chat_model: Path, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "two.py").write_text(ENVIRONMENT)
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "agent.py").write_text(AGENT)
    environment = {
        "conversation": {"environment.name": f"{tmp_path}/two.py:TwoTurns", "environment.args.answer": "again"},
        "tools": {
            "environment": "tools",
            "environment.args.functions": f"[{tmp_path}/tools.py:look_up]",
            "environment.args.tell": "false",
            "model.chat.tool_parser": "qwen3",
        },
        "openai": {"environment": "openai", "environment.args.agent": f"{tmp_path}/agent.py:run"},
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": [{"role": "user", "content": f"word {n}"}], "answer": "x"}) + "\n" for n in range(64)
        )
    )
    run = start_local(
        {
            **environment[kind],
            "model.path": chat_model,
            "model.renderer": "default",
            "data.path": rows,
            "data.max_prompt_tokens": 128,
            "learner.steps": 3,
            "learner.max_tokens_per_microbatch": 2048,
            "rollout.host": "process",
        }
    )
    assert run.finish(400) == 0, run.tail()
    measured, samples = run.rows(), run.rows("samples")
    assert [row["step"] for row in measured] == [1, 2, 3] and samples, SAMPLES_FILE
    assert all(row["prompt"].endswith("<eos>assistant: ") for row in samples)
    if kind == "openai":
        assert all(row["completion/length_mean"] <= 8 for row in measured), "of two conversations of 8 and 4 tokens"
    if kind == "conversation":
        assert all(row["completion/length_mean"] <= 8 for row in measured), "what the environment said is not counted"
    if kind in ("conversation", "openai"):
        assert {row["rewards"]["patience"] for row in samples} == {0.25}
