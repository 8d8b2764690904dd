"""Tests of `environment.name=gymnasium`: a custom game, one of gymnasium's, and what is refused before a start."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="needs the extra `gymnasium`")

from asyncrl.checks.rules.settings import ENVIRONMENTS as NAMES
from asyncrl.config import load_config
from asyncrl.environments.games.environment import AT_ONCE, Gymnasium, seed_of
from asyncrl.environments.games.made import Game
from asyncrl.environments.own_thread import start_thread
from asyncrl.environments.probe import check_environment
from asyncrl.environments.registry import ENVIRONMENTS
from asyncrl.errors import ConfigError
from asyncrl.schema import EnvironmentConfig
from tests.environments.games import Dig
from tests.environments.pages import write_programs
from tests.environments.talk import TOKENIZER, Scripted, exact, play, sampled_texts

FILE = str(Path(__file__).with_name("games.py"))
NEEDED = ("run.name=a", "model.path=m", "data.path=d")
DIG = "tests.environments.games:Dig-v0"


def dig(number: object) -> str:
    return f"<action>dig {number}</action>"


async def test_an_episode_is_a_game_whose_rewards_are_its_turns() -> None:
    turns = ["<action>look</action>", "I think " + dig(3) + " or " + dig(4), dig(7)]
    columns = {"options": {"treasure": 7}}
    episodes, engine = await play(Gymnasium(env=DIG), turns, prompt="Dig!", columns=columns, size=2)
    assert sampled_texts(episodes) == [f"{turn}<|im_end|>" for turn in turns]
    for trajectory in episodes.trajectories:
        assert trajectory.turn_rewards == (0.0, 0.0, 1.0) and trajectory.reward == 1.0
        assert trajectory.finish_reason == "stop" and trajectory.rewards == {}
    read = TOKENIZER.decode(engine.requests[-1].prompt_ids.tolist())
    assert "There are 10 holes. Say dig and a number." in read and "The treasure is 3 holes away." in read
    assert "That is no action: an action has 1 to 10 letters of those allowed. The game has not moved." in read
    assert read.count("<|im_end|>") == 7, "what a game says is text: a marker in it ends no turn"
    exact(episodes, engine)


async def test_the_game_s_limit_of_time_and_ours_end_an_episode_as_cut() -> None:
    for settings, steps in (({}, 3), ({"max_turns": 2}, 2)):
        made = Gymnasium(env=DIG, **settings)
        episodes, _ = await play(made, lambda text: dig(1), columns={"options": {"treasure": 9}})
        (trajectory,) = episodes.trajectories
        assert trajectory.turn_rewards == (0.0,) * steps and trajectory.finish_reason == "length"


async def test_a_context_that_is_full_keeps_what_was_earned() -> None:
    engine = Scripted(lambda text: dig("x" * 40))
    engine.max_length = 500
    episodes, _ = await play(Gymnasium(env=f"{FILE}:Dig", invalid_reward=-0.5), None, engine=engine)
    (trajectory,) = episodes.trajectories
    assert trajectory.finish_reason == "length" and set(trajectory.turn_rewards) == {-0.5}
    assert trajectory.reward == sum(trajectory.turn_rewards)


async def test_siblings_begin_alike_and_rows_differ() -> None:
    game = Gymnasium(env=DIG)
    read = []
    for seed in (3, 3, 4):
        episodes, _ = await play(game, lambda text: dig(0), columns={"seed": seed}, size=3)
        assert len({each.token_ids.tobytes() for each in episodes.trajectories}) == 1
        read.append(episodes.trajectories[0].token_ids.tolist())
    assert read[0] == read[1] != read[2]
    assert seed_of({"prompt": "a"}) == seed_of({"prompt": "a"}) != seed_of({"prompt": "b"})


async def test_a_game_that_gymnasium_ships_is_played_by_the_names_of_its_actions() -> None:
    settings: dict[str, Any] = {"args": {"render_mode": "ansi", "is_slippery": False}, "tag": ""}
    lake = Gymnasium(env="FrozenLake-v1", actions=["left", "down", "right", "up"], **settings)
    way = ["jump", "Down", "1", "right", "right", "down", "right"]
    episodes, engine = await play(lake, way, columns={"seed": 1})
    assert episodes.trajectories[0].turn_rewards == (0.0,) * 6 + (1.0,)
    read = TOKENIZER.decode(engine.requests[-1].prompt_ids.tolist())
    assert "[S]FFF\nFHFH\nFFFH\nHFFG" in read and "(Down)\nSFFF\n[F]HFH\n" in read and "\x1b" not in read
    assert "an action is one of left, down, right, up" in read
    exact(episodes, engine)


async def test_a_step_that_hangs_fails_its_episode_at_the_deadline() -> None:
    slow = Gymnasium(env=f"{FILE}:Dig", args={"slow_s": 2.0})
    episodes, _ = await play(slow, lambda text: dig(1), timeout_s=0.5)
    assert "longer than 0.5 s" in str(episodes.failures[0])


def test_a_game_has_a_deadline_that_nobody_has_to_set() -> None:
    config = load_config([*NEEDED, "environment=gymnasium", f"environment.args.env={DIG}"])
    assert config.environment.timeout_s == 600.0


async def test_games_that_hang_take_no_thread_that_the_worker_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(Game, "step", lambda game, action: go_on.wait(100))
    pool = min(32, (os.cpu_count() or 1) + 4)  # threads of `asyncio.to_thread`
    try:
        episodes, _ = await play(Gymnasium(env=DIG), lambda text: dig(1), timeout_s=0.5, size=pool + AT_ONCE)
        assert len(episodes.failures) == pool + AT_ONCE
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 60) == "free"
    finally:
        go_on.set()


def test_a_game_that_is_given_up_is_closed_when_its_step_ends() -> None:
    begun, go_on, closed = threading.Event(), threading.Event(), []

    class Slow(Dig):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            begun.set()
            assert go_on.wait(60)
            return super().step(action)

        def close(self) -> None:
            closed.append("closed")

    game = Game(Slow(), [])
    game.begin(0, None)
    step = start_thread(lambda: game.step("dig 1"), "step")
    assert begun.wait(60)
    game.close()
    assert not closed
    go_on.set()
    step.result(60.0)
    game.close()
    assert closed == ["closed"]


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
async def test_a_reward_that_is_no_number_fails_its_episode_alone(reward: float, monkeypatch: Any) -> None:
    played = itertools.count()
    monkeypatch.setattr(Game, "step", lambda game, action: ("", reward if next(played) else 1.0, True, False))
    episodes, _ = await play(Gymnasium(env=DIG), lambda text: dig(1), size=2)
    assert [each.reward for each in episodes.trajectories] == [1.0]
    assert "the reward of a turn must be a finite number" in str(episodes.failures[0])


async def test_a_row_that_is_none_fails_by_its_name() -> None:
    for columns, says in (
        ({"seed": -1}, "seed must be an integer"),
        ({"options": [1]}, "options must be a dictionary"),
    ):
        episodes, _ = await play(Gymnasium(env=f"{FILE}:Dig"), lambda text: dig(1), columns=columns)
        assert says in str(episodes.failures[0])


REFUSED = [
    ({}, "has no game. Name one"),
    ({"env": "Chess-v7"}, "cannot be created: NameNotFound: Environment `Chess` doesn't exist"),
    ({"env": DIG, "args": {"pits": 3}}, "cannot be created: TypeError"),
    ({"env": f"{FILE}:Chess"}, "has no 'Chess'. It defines: Dig, Pictures, no_game, one_for_all, one_in_wrappers"),
    ({"env": f"{FILE}:no_game"}, "returned a object without reset, so it is not a gymnasium.Env"),
    (
        {"env": f"{FILE}:one_for_all"},
        "one_for_all: it returned the same Dig twice, but each episode needs",
    ),
    ({"env": f"{FILE}:one_in_wrappers"}, "it returned the same Dig twice"),
    ({"env": f"{FILE}:Pictures"}, "observations must be texts (spaces.Text); got Box"),
    ({"env": f"{FILE}:Pictures"}, "wrappers.TransformObservation(game, to_text, spaces.Text(1000))"),
    ({"env": "FrozenLake-v1"}, "add environment.args.args.render_mode=ansi"),
    ({"env": "MountainCarContinuous-v0"}, "actions must be texts or numbers"),
    ({"env": f"{FILE}:Dig", "actions": ["dig"]}, "names 1 actions, but those of the game are Text"),
    ({"env": f"{FILE}:Dig", "actions": "dig"}, "environment.args.actions must be a list"),
    ({"env": f"{FILE}:Dig", "max_turns": 0}, "environment.args.max_turns must be above 0"),
    ({"env": f"{FILE}:Dig", "tag": "<a>"}, "environment.args.tag must be a word"),
]


@pytest.mark.parametrize(("args", "says"), REFUSED)
def test_what_is_no_text_game_is_refused(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Gymnasium.check(**args)
    assert says in str(refused.value)


def test_a_start_asks_in_a_process_of_its_own() -> None:
    check_environment(EnvironmentConfig(name="gymnasium", args={"env": f"{FILE}:Dig"}))
    with pytest.raises(ConfigError, match=r"environment.args.env=Chess-v7"):
        check_environment(EnvironmentConfig(name="gymnasium", args={"env": "Chess-v7"}))


def test_the_settings_know_every_environment() -> None:
    assert set(NAMES) == set(ENVIRONMENTS)


async def test_the_game_of_the_page_is_played(tmp_path: Path) -> None:
    write_programs(tmp_path)
    game = Gymnasium(env=f"{tmp_path}/dig.py:Dig", tag="")
    holes = (str(each) for each in range(9, -1, -1))
    episodes, engine = await play(game, lambda text: next(holes))
    (trajectory,) = episodes.trajectories
    assert trajectory.reward == 1.0 or (trajectory.finish_reason == "length" and len(trajectory.turn_rewards) == 5)
    exact(episodes, engine)
