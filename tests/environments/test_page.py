"""docs/environments.md: tests/rollout and tests/integration run its programs; here its commands are accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from asyncrl.config import load_config
from asyncrl.environments.openai.environment import OpenAI
from asyncrl.environments.registry import make_environment
from asyncrl.environments.tools.host import Toolbox
from asyncrl.schema import EnvironmentConfig
from tests.environments.pages import PAGE, programs, write_programs
from tests.environments.talk import call, exact, play, sampled_texts

REQUIRED = ["model.path=m", "data.path=d.jsonl", "reward.function=r.py:f"]


def test_every_block_of_code_is_a_program_that_other_tests_run() -> None:
    assert set(programs()) == {
        "guess.py",
        "calculator.py",
        "dig.py",
        "arena.py",
        "agent.py",
        "second_try.py",
        "taught.py",
    }
    assert len(re.findall(r"^```\w", PAGE.read_text(), flags=re.MULTILINE)) == 7


def test_every_command_of_the_page_is_accepted() -> None:
    commands = re.findall(r"^    (?:\w+=\S+ )?asyncrl local \.\.\. (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    configs = [load_config([*REQUIRED, *shlex.split(command)]) for command in commands]
    names = ["guess.py:Guess", "tools", "python", "search", "reasoning_gym", "gymnasium", "arena.py:Arena", "openai"]
    names += ["verifiers", "taught.py:Taught", "taught.py:Taught"]
    assert [config.environment.name for config in configs] == names
    assert [config.reference.from_rollout for config in configs] == [False] * 9 + [True] * 2


async def test_the_guessing_game_is_played_by_hints_in_at_most_25_lines(tmp_path: Path) -> None:
    write_programs(tmp_path)
    assert len([line for line in programs()["guess.py"].splitlines() if line.strip()]) <= 25
    game = make_environment(EnvironmentConfig(name=f"{tmp_path}/guess.py:Guess", args={"turns": 3}))

    def halves(text: str) -> str:
        return {0: "50", 1: "25"}.get(text.count("higher") + text.count("lower"), "42")

    episodes, engine = await play(game, halves, prompt="Guess", columns={"number": 42})
    assert sampled_texts(episodes) == ["50<|im_end|>", "25<|im_end|>", "42<|im_end|>"]
    assert episodes.trajectories[0].reward == 1.0 - 2 / 3
    exact(episodes, engine)
    lost, _ = await play(game, lambda text: "a hundred", columns={"number": 42})
    assert [each.reward for each in lost.trajectories] == [0.0]


async def test_a_game_of_textarena_is_played_by_its_hints(tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    write_programs(tmp_path)
    config = EnvironmentConfig(name=f"{tmp_path}/arena.py:Arena", args={"game": "GuessTheNumber-v0-raw"})

    def halves(text: str) -> str:
        low, high = 1, 20
        for hint in re.findall(r"target number is (higher|lower)", text):
            low, high = ((low + high) // 2 + 1, high) if hint == "higher" else (low, (low + high) // 2 - 1)
        return f"[{(low + high) // 2}]"

    opening = [{"role": "system", "content": "You play a game."}]
    episodes, engine = await play(make_environment(config), halves, prompt=opening, columns={"seed": 3}, size=2)
    assert [each.reward for each in episodes.trajectories] == [1.0, 1.0]
    exact(episodes, engine)


async def test_the_agent_of_the_page_is_trained_on_what_was_sampled_in_at_most_25_lines(tmp_path: Path) -> None:
    write_programs(tmp_path)
    assert len([line for line in programs()["agent.py"].splitlines() if line.strip()]) <= 25
    environment = OpenAI(agent=f"{tmp_path}/agent.py:solve")
    turns = [call("add", a=2, b=3), "It is 5."]
    episodes, engine = await play(environment, turns, prompt="2 + 3?", columns={"answer": "5"})
    await environment.close()
    assert sampled_texts(episodes) == [f"{turn}<|im_end|>" for turn in turns]
    assert episodes.trajectories[0].reward == 1.0
    exact(episodes, engine)


def test_the_calculator_can_be_told_of(tmp_path: Path) -> None:
    box = Toolbox([f"{write_programs(tmp_path)}/calculator.py:calculate"])
    assert box.call("calculate", {"expression": "6 * (3 + 4)"}) == (True, "42")
    assert box.call("calculate", {"expression": "exit()"})[0] is False
