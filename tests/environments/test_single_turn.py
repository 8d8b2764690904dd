from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncrl.environments.base import EpisodeTools
from asyncrl.environments.registry import make_environment
from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.score import RewardScore
from asyncrl.schema import EnvironmentConfig
from asyncrl.types import NO_VERSION, Completion, Prompt

PROMPT = Prompt(
    index=3,
    epoch=0,
    row=3,
    token_ids=np.array([97, 98, 62], np.int32),
    text="ab>",
    columns={"prompt": "ab>", "answer": "ba"},
)


def completion(tokens: list[int], versions: list[int]) -> Completion:
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
        policy_versions=np.array(versions, np.int32),
        finish_reason="stop",
    )


def run(score):
    async def generate(token_ids, n):
        assert token_ids.tolist() == [97, 98, 62]
        return [completion([98, 97, 258], [4, 5, 5]), completion([120], [5])][:n]

    tools = EpisodeTools(
        generate=generate,
        decode=lambda sequences: [bytes(i for i in ids.tolist() if i < 256).decode() for ids in sequences],
        encode=lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.int32),
        score=score,
    )
    return asyncio.run(make_environment(EnvironmentConfig()).run(PROMPT, 2, tools))


def test_a_trajectory_is_prompt_and_completion_with_the_engine_s_own_ids_and_logprobs():
    async def score(texts, row, **_):
        assert (texts, row["answer"]) == (["ba", "x"], "ba")
        return [RewardScore(value=1.0, parts={"length": 2.0}), RewardScore(value=0.0)]

    episodes = run(score)
    first, second = episodes.trajectories
    assert first.token_ids.tolist() == [97, 98, 62, 98, 97, 258]
    assert first.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert first.behavior_logprobs.tolist() == [0, 0, 0, -1, -2, -3]
    assert first.policy_versions.tolist() == [NO_VERSION] * 3 + [4, 5, 5]
    assert (first.reward, first.rewards, first.prompt_length) == (1.0, {"length": 2.0}, 3)
    assert (second.reward, episodes.texts) == (0.0, ("ba", "x"))
    dtypes = [a.dtype for a in (first.token_ids, first.loss_mask, first.behavior_logprobs, first.policy_versions)]
    assert dtypes == [np.int32, np.bool_, np.float32, np.int32]


def test_a_reward_failure_is_passed_on_and_scores_nothing():
    async def score(texts, row, **_):
        raise RewardError("no")

    with pytest.raises(RewardError):
        run(score)


def test_a_reward_of_the_wrong_size_is_never_cut_to_fit():
    async def score(texts, row, **_):
        return [RewardScore(value=1.0)]

    with pytest.raises(ValueError, match="shorter"):
        run(score)


def test_an_unknown_environment_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="single_turn"):
        make_environment(EnvironmentConfig(name="chess"))
