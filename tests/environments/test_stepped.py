"""Games with `reset` and `step`: one object per episode, rewards summed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments.registry import find_environment, make_environment
from asyncrl.environments.stepped import Stepped
from asyncrl.errors import ConfigError
from asyncrl.schema import EnvironmentConfig
from tests.environments.talk import TOKENIZER, Scripted, exact, play, sampled_texts

GAME = """
class Count:
    def __init__(self, goal: int = 3):
        self.goal, self.count = goal, 0

    def reset(self, row):
        return f"Count to {self.goal}, beginning with {row['first']}."

    async def step(self, text):
        self.count += 1
        return ("go on", 0.5, self.count == self.goal)


class Gym(Count):
    def reset(self, row):
        return "obs", {}

    def step(self, text):
        self.count += 1
        return "go on", 1, False, self.count == 2, {}


class Wrong(Count):
    def step(self, text):
        return "no reward"


ONE = Count()


def one_for_all():
    return ONE
"""


@pytest.fixture
def game(tmp_path: Path) -> Any:
    (tmp_path / "game.py").write_text(GAME)

    def make(name: str, **args: Any) -> Any:
        config = EnvironmentConfig(name=f"{tmp_path}/game.py:{name}", args=args)
        find_environment(config)
        return make_environment(config)

    return make


async def test_each_episode_has_a_game_of_its_own_and_the_sum_of_its_rewards(game: Any) -> None:
    turns = ["one", "two", "three"]
    episodes, engine = await play(game("Count", goal=3), turns, columns={"first": 1}, size=3)
    assert [each.reward for each in episodes.trajectories] == [1.5] * 3
    assert [(each.turn_rewards, each.rewards) for each in episodes.trajectories] == [((0.5, 0.5, 0.5), {})] * 3
    assert sampled_texts(episodes) == [f"{turn}<|im_end|>" for turn in turns]
    assert "Count to 3, beginning with 1." in TOKENIZER.decode(engine.requests[0].prompt_ids.tolist())
    exact(episodes, engine)


def test_a_function_that_returns_one_game_to_all_episodes_is_refused(game: Any) -> None:
    with pytest.raises(ConfigError, match="one_for_all: it returned the same Count twice"):
        game("one_for_all")


async def test_gymnasium_s_values_are_understood(game: Any) -> None:
    episodes, engine = await play(game("Gym"), ["a", "b"])
    assert episodes.trajectories[0].reward == 2.0 and "obs" in TOKENIZER.decode(engine.requests[0].prompt_ids.tolist())


async def test_the_context_s_end_keeps_the_rewards_so_far(game: Any) -> None:
    engine = Scripted(lambda text: "x" * 50)
    engine.max_length = 300
    episodes, _ = await play(game("Count", goal=100), None, engine=engine, columns={"first": 1})
    (trajectory,) = episodes.trajectories
    assert set(trajectory.turn_rewards) == {0.5}
    assert (
        trajectory.reward == sum(trajectory.turn_rewards) >= 0.5
        and trajectory.finish_reason == "length"
        and len(trajectory.token_ids) <= 300
    )


@pytest.mark.parametrize("told", [{"weird": 1}, ["text"], [{"role": "user"}]])
async def test_what_the_policy_cannot_read_fails_its_episode_and_is_not_told_as_python(told: Any) -> None:
    class Tells:
        def reset(self, row: dict[str, Any]) -> Any:
            return told

        def step(self, text: str) -> Any:
            return None, 1.0, True

    episodes, _ = await play(Stepped(Tells, {}), ["hello"])
    assert "messages with `role` and `content`, or None to read" in str(episodes.failures[0])
    told = {"role": "system", "content": "one message is one"}
    episodes, engine = await play(Stepped(Tells, {}), ["hello"])
    assert "<|im_start|>system\none message is one<|im_end|>" in TOKENIZER.decode(
        engine.requests[0].prompt_ids.tolist()
    )
    assert not episodes.failures


async def test_what_is_no_step_fails_its_episode_with_the_form(game: Any) -> None:
    episodes, _ = await play(game("Wrong"), ["x"], columns={"first": 1})
    assert "step() must return (observation, reward, done)" in str(episodes.failures[0])


def test_it_is_found_by_its_methods(game: Any) -> None:
    assert isinstance(game("Count")._inner, Stepped)
