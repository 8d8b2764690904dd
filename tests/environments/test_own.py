"""Environments of the user: how they are found, and that nothing they do costs more than their group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.environments.base import Episodes, EpisodeTools
from asyncrl.environments.guard import GuardedEnvironment
from asyncrl.environments.registry import find_environment, make_environment
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.environments.transcript import Transcript
from asyncrl.errors import ConfigError, EngineDiedError, EpisodeError, GenerationError, RewardError
from asyncrl.rewards.score import RewardScore
from asyncrl.schema import EnvironmentConfig
from asyncrl.types import Completion, Prompt, Trajectory

PROMPT = Prompt(index=0, epoch=0, row=0, token_ids=np.array([97, 62], np.int32), text="a>", columns={"prompt": "a>"})
VOCABULARY = 264


def completion(*tokens: int, version: int = 4) -> Completion:
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        policy_versions=np.full(len(tokens), version, np.int32),
        finish_reason="stop",
    )


async def generate(token_ids: Any, n: int) -> list[Completion]:
    return [completion(98, 258)] * n


async def score(texts: list[str], row: dict[str, Any]) -> list[RewardScore]:
    return [RewardScore(value=1.0)] * len(texts)


TOOLS = EpisodeTools(
    generate=generate,
    decode=lambda sequences: ["b"] * len(sequences),
    encode=lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.int32),
    score=score,
)


def sound() -> Trajectory:
    """prompt | sampled | observation | sampled by newer weights."""
    transcript = Transcript(PROMPT)
    transcript.add_completion(completion(98, 99))
    transcript.add_observation([100])
    transcript.add_completion(completion(101, 258, version=5))
    return transcript.trajectory(np.float32(0.5))


def episodes(*trajectories: Any, **changes: Any) -> Episodes:
    return replace(Episodes(trajectories=trajectories, texts=("b",) * len(trajectories)), **changes)


class Own:
    """Does what the test says."""

    def __init__(self, act: Callable[[Prompt, EpisodeTools], Any]) -> None:
        self.act = act

    async def run(self, prompt: Prompt, size: int, tools: EpisodeTools) -> Any:
        outcome = self.act(prompt, tools)
        return await outcome if asyncio.iscoroutine(outcome) else outcome


def run(act: Callable[[Prompt, EpisodeTools], Any], size: int = 1) -> Episodes:
    return asyncio.run(GuardedEnvironment("mine.py:Own", Own(act), VOCABULARY).run(PROMPT, size, TOOLS))


def raises(error: BaseException) -> Callable[[Prompt, EpisodeTools], Any]:
    def act(prompt: Prompt, tools: EpisodeTools) -> Any:
        raise error

    return act


def test_a_transcript_keeps_every_turn_in_step() -> None:
    made = sound()
    assert made.token_ids.tolist() == [97, 62, 98, 99, 100, 101, 258]
    assert made.loss_mask.tolist() == [False, False, True, True, False, True, True]
    assert made.behavior_logprobs.tolist() == [0, 0, -0.5, -0.5, 0, -0.5, -0.5]
    assert made.policy_versions.tolist() == [-1, -1, 4, 4, -1, 5, 5]
    assert (made.reward, type(made.reward), made.prompt_length) == (0.5, float, 2)


def test_what_is_sound_passes_as_it_is() -> None:
    extras = {"teacher": np.zeros((2, 3), np.float16)}
    given = episodes(replace(sound(), extras=extras), failures=[RewardError("no")])
    passed = run(lambda prompt, tools: given, size=2)
    assert passed.trajectories[0] is given.trajectories[0]
    assert (len(passed.trajectories), passed.texts, passed.failures) == (1, ("b",), tuple(given.failures))


WRONG: dict[str, tuple[Any, str]] = {
    "no episodes": ({"trajectories": []}, r"returned {'trajectories': \[\]}, not Episodes"),
    "nothing": (None, "returned None, not Episodes"),
    "a generator": (Episodes(trajectories=(x for x in ()), texts=()), "trajectories must be a tuple; a generator came"),
    "too few": (episodes(), "0 trajectories and 0 failures came, and 1 episodes were asked for"),
    "too many": (episodes(sound(), sound()), "2 trajectories and 0 failures came"),
    "no text": (episodes(sound(), texts=()), "texts has one str per trajectory"),
    "a strange failure": (episodes(failures=(KeyError("x"),)), r"a failure is a .*KeyError\('x'\) came"),
    "no trajectory": (episodes("abc"), "trajectory 0: 'abc' came, not a Trajectory"),
    "a list": (episodes(replace(sound(), loss_mask=[True])), "loss_mask must be a numpy array of bool; a list"),
    "wrong dtype": (
        episodes(replace(sound(), token_ids=sound().token_ids.astype(np.int64))),
        r"token_ids must be int32\[7\]; int64\[7\] came",
    ),
    "wrong length": (
        episodes(replace(sound(), behavior_logprobs=np.zeros(3, np.float32))),
        r"behavior_logprobs must be float32\[7\]; float32\[3\] came",
    ),
    "another prompt": (
        episodes(replace(sound(), token_ids=sound().token_ids[::-1].copy())),
        "it must begin with the prompt's 2 tokens",
    ),
    "a trained prompt": (episodes(replace(sound(), loss_mask=np.ones(7, bool))), "none of them in the loss mask"),
    "only a prompt": (episodes(Transcript(PROMPT).trajectory(1.0)), "its loss mask is empty"),
    "unknown ids": (
        episodes(replace(sound(), token_ids=np.array([97, 62, 98, 99, 264, 101, 258], np.int32))),
        r"token ids must be in \[0, 264\), the model's vocabulary; 62 to 264 came",
    ),
    "time runs backwards": (
        episodes(replace(sound(), policy_versions=-sound().policy_versions)),
        "policy_versions of sampled tokens went down",
    ),
    "another ending": (
        episodes(replace(sound(), finish_reason="done")),
        "finish_reason must be stop or length; 'done'",
    ),
    "no reward": (episodes(replace(sound(), reward=float("nan"))), "reward must be a finite number"),
    "not scored": (
        episodes(replace(sound(), behavior_logprobs=np.full(7, np.nan, np.float32))),
        "behavior_logprobs of loss tokens must be finite",
    ),
    "an extra of objects": (episodes(replace(sound(), extras={"x": np.array([None])})), "dtype"),
    "rewards by number": (episodes(replace(sound(), rewards={1: 0.5})), r"rewards must be named by strings; \[1\]"),
    "extras that are none": (episodes(replace(sound(), extras=None)), "extras and rewards must be dictionaries"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_trained_on_fails_the_group_with_the_fault(name: str) -> None:
    outcome, says = WRONG[name]
    with pytest.raises(EpisodeError, match=says) as raised:
        run(lambda prompt, tools: outcome)
    assert "environment.name=mine.py:Own" in str(raised.value)


@pytest.mark.parametrize(
    "error", [KeyError("a bug"), SystemExit(3), ConfigError("x"), asyncio.CancelledError()], ids=repr
)
def test_whatever_is_raised_fails_the_group_alone(error: BaseException) -> None:
    with pytest.raises(EpisodeError, match=r"environment\.name=mine\.py:Own"):
        run(raises(error))


@pytest.mark.parametrize("error", [GenerationError("full"), RewardError("none"), EngineDiedError("gone")], ids=repr)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_failure_of_a_tool_stays_what_it_is(error: Exception, wrapped: bool) -> None:
    async def in_a_task_group() -> None:
        async def tool() -> None:
            raise error

        async with asyncio.TaskGroup() as together:
            together.create_task(tool())

    with pytest.raises(type(error), match=str(error)):
        run(lambda prompt, tools: in_a_task_group() if wrapped else raises(error)(prompt, tools))


@pytest.mark.parametrize(
    ("ids", "n", "says"),
    [
        ([97, 264], 1, r"must be in \[0, 264\).*got 97 to 264"),
        ([-1], 1, "got -1"),
        ([[97]], 1, "got int64"),
        ([97], 0, "and 0"),
    ],
)
def test_what_no_engine_could_go_on_from_is_the_environment_s_fault(ids: Any, n: int, says: str) -> None:
    with pytest.raises(EpisodeError, match=says):
        run(lambda prompt, tools: tools.generate(ids, n))


def test_cancelling_the_worker_s_task_is_no_failure() -> None:
    async def scenario() -> bool:
        task = asyncio.create_task(
            GuardedEnvironment("mine", Own(lambda prompt, tools: asyncio.sleep(3600)), VOCABULARY).run(PROMPT, 1, TOOLS)
        )
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(scenario())


def test_the_prompt_cannot_be_written_to() -> None:
    def act(prompt: Prompt, tools: EpisodeTools) -> Any:
        prompt.token_ids[0] = 1

    with pytest.raises(EpisodeError, match="read-only"):
        run(act)
    assert PROMPT.token_ids.tolist() == [97, 62]


FILE = """
class Sound:
    async def run(self, prompt, size, tools):
        raise NotImplementedError


class NoRun:
    pass


class Needy(Sound):
    def __init__(self, level):
        pass


class Broken(Sound):
    def __init__(self):
        raise OSError("no GPU")


def factory():
    return Sound()


def wrong_factory():
    return 3


number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(FILE)
    return tmp_path / "own.py"


@pytest.mark.parametrize("name", ["Sound", "factory"])
def test_a_class_or_factory_is_found_and_guarded(own: Path, name: str) -> None:
    assert callable(find_environment(EnvironmentConfig(name=f"{own}:{name}")))
    assert isinstance(make_environment(EnvironmentConfig(name=f"{own}:{name}")), GuardedEnvironment)


def test_a_module_s_class_is_found_and_ours_is_not_guarded() -> None:
    spec = EnvironmentConfig(name="asyncrl.environments.single_turn:SingleTurn")
    assert find_environment(spec) is SingleTurn
    assert isinstance(make_environment(EnvironmentConfig()), SingleTurn)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Nobody", r"has no 'Nobody'. It defines: Broken, Needy, NoRun, Sound, factory, wrong_factory"),
        ("number", "is a int, not a function"),
        ("NoRun", r"NoRun has no run. Give it `async def run\(self, prompt, size, tools\) -> Episodes`"),
        ("Needy", "cannot be called without arguments: .*level"),
    ],
)
def test_a_name_that_is_no_environment_is_refused_before_a_start(own: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        find_environment(EnvironmentConfig(name=f"{own}:{name}"))
    assert "environment.name=" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "says"), [("wrong_factory", "the int it made has no run"), ("Broken", "OSError: no GPU")]
)
def test_what_cannot_be_made_is_a_refused_setting(own: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_environment(EnvironmentConfig(name=f"{own}:{name}"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment\.name=.*there is no file"):
        find_environment(EnvironmentConfig(name=f"{tmp_path}/none.py:Own"))
