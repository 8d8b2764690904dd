"""User environments: their failures never cost more than their group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.request_check import check_request
from asyncrl.environments.base import Episodes, EpisodeTools
from asyncrl.environments.guard import GuardedEnvironment, close_environment
from asyncrl.environments.transcript import Transcript
from asyncrl.errors import ConfigError, EngineDiedError, EpisodeError, GenerationError, RewardError
from asyncrl.rewards.score import RewardScore
from asyncrl.types import Completion, Prompt, SamplingParams, Trajectory

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


async def score(texts: list[str], row: dict[str, Any], **_: Any) -> list[RewardScore]:
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


@pytest.mark.parametrize("ids", [[[100]], [1.5], "text"])
def test_an_observation_that_is_no_token_ids_is_refused(ids: Any) -> None:
    transcript = Transcript(PROMPT)
    transcript.add_observation([])
    with pytest.raises(ValueError, match=r"an observation must be token ids \[N\]"):
        transcript.add_observation(ids)
    assert transcript.token_ids.tolist() == [97, 62]


def test_what_is_sound_passes_as_it_is() -> None:
    extras = {"teacher": np.zeros((2, 3), np.float16)}
    given = episodes(replace(sound(), extras=extras), failures=[RewardError("no")])
    passed = run(lambda prompt, tools: given, size=2)
    assert passed.trajectories[0] is given.trajectories[0]
    assert (len(passed.trajectories), passed.texts, passed.failures) == (1, ("b",), tuple(given.failures))


WRONG: dict[str, tuple[Any, str]] = {
    "no episodes": ({"trajectories": []}, r"returned {'trajectories': \[\]}, not Episodes"),
    "nothing": (None, "returned None, not Episodes"),
    "a generator": (Episodes(trajectories=(x for x in ()), texts=()), "trajectories must be a tuple; got a generator"),
    "too few": (episodes(), "got 0 trajectories and 0 failures, but 1 episodes were asked for"),
    "too many": (episodes(sound(), sound()), "got 2 trajectories and 0 failures"),
    "no text": (episodes(sound(), texts=()), "texts must have one str per trajectory"),
    "a strange failure": (episodes(failures=(KeyError("x"),)), r"a failure must be a .*got KeyError\('x'\)"),
    "no trajectory": (episodes("abc"), "trajectory 0: got 'abc' instead of a Trajectory"),
    "a list": (episodes(replace(sound(), loss_mask=[True])), "loss_mask must be a numpy array of bool; got a list"),
    "wrong dtype": (
        episodes(replace(sound(), token_ids=sound().token_ids.astype(np.int64))),
        r"token_ids must be int32\[7\]; got int64\[7\]",
    ),
    "wrong length": (
        episodes(replace(sound(), behavior_logprobs=np.zeros(3, np.float32))),
        r"behavior_logprobs must be float32\[7\]; got float32\[3\]",
    ),
    "another prompt": (
        episodes(replace(sound(), token_ids=sound().token_ids[::-1].copy())),
        "it must begin with the prompt's 2 tokens",
    ),
    "a trained prompt": (episodes(replace(sound(), loss_mask=np.ones(7, bool))), "none of them in the loss mask"),
    "only a prompt": (episodes(Transcript(PROMPT).trajectory(1.0)), "its loss mask is empty"),
    "unknown ids": (
        episodes(replace(sound(), token_ids=np.array([97, 62, 98, 99, 264, 101, 258], np.int32))),
        r"token ids must be in \[0, 264\), the model's vocabulary; got 62 to 264",
    ),
    "time runs backwards": (
        episodes(replace(sound(), policy_versions=-sound().policy_versions)),
        "policy_versions of sampled tokens went down",
    ),
    "another ending": (
        episodes(replace(sound(), finish_reason="done")),
        "finish_reason must be stop or length; got 'done'",
    ),
    "no reward": (episodes(replace(sound(), reward=float("nan"))), "reward must be a finite number"),
    "not scored": (
        episodes(replace(sound(), behavior_logprobs=np.full(7, np.nan, np.float32))),
        "behavior_logprobs of loss tokens must be finite",
    ),
    "an extra of objects": (episodes(replace(sound(), extras={"x": np.array([None])})), "dtype"),
    "rewards by number": (episodes(replace(sound(), rewards={1: 0.5})), r"rewards must be named by strings; got \[1\]"),
    "a reward beyond all bounds": (episodes(replace(sound(), reward=10**400)), "OverflowError"),
    "a reward too large to square": (episodes(replace(sound(), reward=-1e30)), r"a reward is -1e\+30. The learner"),
    "a turn's reward too large": (episodes(replace(sound(), turn_rewards=(0.0, 1e16))), r"a reward is 1e\+16"),
    "an ending of several words": (episodes(replace(sound(), finish_reason=np.array(["a", "b"]))), "ValueError"),
    "a text that is none": (episodes(sound(), texts=("\ud800",)), "cannot be sent: .*surrogates"),
    "a part that has no name": (episodes(replace(sound(), rewards={"\ud800": 0.5})), "cannot be sent: .*surrogates"),
    "extras that are none": (episodes(replace(sound(), extras=None)), "extras and rewards must be dictionaries"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_trained_on_fails_the_group_with_the_fault(name: str) -> None:
    outcome, says = WRONG[name]
    with pytest.raises(EpisodeError, match=says) as raised:
        run(lambda prompt, tools: outcome)
    assert "environment.name=mine.py:Own" in str(raised.value)


class Panic(BaseException):
    """As extensions in Rust raise it, tokenizers among them."""


@pytest.mark.parametrize(
    "error",
    [KeyError("a bug"), SystemExit(3), ConfigError("x"), asyncio.CancelledError(), Panic("a bug")],
    ids=repr,
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


def test_a_bug_in_the_handling_of_a_failed_reward_is_seen() -> None:
    def act(prompt: Prompt, tools: EpisodeTools) -> Any:
        try:
            raise RewardError("none")
        except RewardError:
            return {}["a bug"]

    with pytest.raises(EpisodeError, match="KeyError: 'a bug'"):
        run(act)


def test_an_episode_too_long_for_the_engine_is_the_environment_s_fault() -> None:
    async def too_long(token_ids: Any, n: int) -> list[Completion]:
        ids, sampling = np.asarray(token_ids, np.int32), SamplingParams(temperature=1.0, max_new_tokens=4)
        request = GenerateRequest(request_id="r", prompt_ids=ids, n=n, sampling=sampling, seed=0)
        check_request(request, VOCABULARY, max_length=12)
        return await generate(token_ids, n)

    async def episode(prompt: Prompt, tools: EpisodeTools) -> Episodes:
        transcript = Transcript(prompt)
        while True:
            for answer in await tools.generate(transcript.token_ids, 1):
                transcript.add_completion(answer)

    guarded = GuardedEnvironment("mine.py:Own", Own(episode), VOCABULARY)
    with pytest.raises(EpisodeError, match=r"mine\.py:Own: prompt and max_new_tokens together are 14 tokens"):
        asyncio.run(guarded.run(PROMPT, 1, replace(TOOLS, generate=too_long)))


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
        prompt.columns.clear()
        prompt.token_ids[0] = 1

    with pytest.raises(EpisodeError, match="read-only"):
        run(act)
    assert (PROMPT.token_ids.tolist(), PROMPT.columns) == ([97, 62], {"prompt": "a>"})


async def test_a_close_that_blocks_holds_up_nobody_and_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("asyncrl.environments.guard.CLOSE_S", 0.2)
    ticked, let_go = asyncio.Event(), threading.Event()

    class Blocking:
        def close(self) -> None:
            let_go.wait(60)

    async def tick() -> None:
        await asyncio.sleep(0.01)
        ticked.set()

    others = asyncio.create_task(tick())
    await close_environment(GuardedEnvironment("own", Blocking(), 10))  # pyright: ignore[reportArgumentType]
    let_go.set()
    assert ticked.is_set() and others.done() and "took more than 0.2 s and is left alone" in caplog.text


async def test_an_environment_is_closed_in_the_form_it_has_and_its_failure_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed: list[str] = []

    class Plain:
        def close(self) -> None:
            closed.append("plain")

    class Later:
        async def aclose(self) -> None:
            closed.append("later")

        def close(self) -> None:
            closed.append("never")

    class Broken:
        async def close(self) -> None:
            raise OSError("gone already")

    for each in (Plain(), Later(), Broken(), object()):
        await close_environment(GuardedEnvironment("own", each, 10))  # pyright: ignore[reportArgumentType]
    assert closed == ["plain", "later"]
    assert "Broken: its close() failed" in caplog.text and "gone already" in caplog.text
