"""Named parts of the reward that an advantage needs, including the greedy baseline."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.fake import FakeEngine
from asyncrl.errors import RewardError
from asyncrl.rewards.score import RewardScore
from asyncrl.rollout.rewards.parts import RewardParts
from asyncrl.schema import AdvantageConfig
from asyncrl.types import GREEDY_REWARD, Completion, DropReason
from tests.replay.core.batches.test_order import ORDER
from tests.replay.helpers import group as replay_group
from tests.rollout.rollout_fakes import SAMPLING, ByteTokenizer, ScriptedReplay, make_worker, rows_file


class ListeningEngine(FakeEngine):
    """Keeps what it was asked and what it answered."""

    def __init__(self) -> None:
        super().__init__(vocabulary=128)
        self.load_weights(0, {})
        self.answered: list[tuple[GenerateRequest, list[Completion]]] = []

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        completions = await super().generate(request)
        self.answered.append((request, completions))
        return completions


def parts_of(**advantage) -> RewardParts:
    return RewardParts.of(AdvantageConfig(**advantage), SAMPLING)


def work(tmp_path, parts: RewardParts, **changes) -> ScriptedReplay:
    replay = ScriptedReplay(3)
    asyncio.run(make_worker(replay, rows_file(tmp_path / "rows.jsonl", 3), parts=parts, **changes).run())
    return replay


def test_every_trajectory_carries_the_reward_of_a_greedy_completion_that_is_not_in_the_group(tmp_path):
    engine = ListeningEngine()
    replay = work(tmp_path, parts_of(baseline="greedy"), engine=engine)
    greedy = {r.prompt_ids.tobytes(): c for r, c in engine.answered if r.sampling.temperature == 0}
    sampled = [request for request, _ in engine.answered if request.sampling.temperature > 0]
    assert len(greedy) == len(sampled) == len(replay.inserted) == 3
    assert {request.n for request in sampled} == {4}
    for group in replay.inserted:
        first = group.trajectories[0]
        (completion,) = greedy[first.token_ids[: first.prompt_length].tobytes()]
        (text,) = ByteTokenizer().decode([completion.token_ids])
        assert [t.rewards[GREEDY_REWARD] for t in group.trajectories] == [float(len(text))] * 4
        assert all("letters" in t.rewards for t in group.trajectories)


def test_no_other_advantage_asks_for_a_greedy_completion(tmp_path):
    engine = ListeningEngine()
    replay = work(tmp_path, parts_of(), engine=engine)
    assert len(engine.answered) == len(replay.inserted) == 3
    assert all(set(t.rewards) == {"letters"} for group in replay.inserted for t in group.trajectories)


def test_an_advantage_by_turn_gets_zeros_where_nobody_said_and_no_other_does(tmp_path):
    for estimator, expected in (("turns", (0.0,)), ("group", ())):
        folder = tmp_path / estimator
        folder.mkdir()
        replay = work(folder, parts_of(estimator=estimator))
        assert all(t.turn_rewards == expected for group in replay.inserted for t in group.trajectories)


async def named_like_the_baseline(texts, row, *, sampled=None):
    return [RewardScore(value=1.0, parts={GREEDY_REWARD: 1.0}) for _ in texts]


@pytest.mark.parametrize(
    ("parts", "changes", "says"),
    [
        (
            parts_of(estimator="gdpo", components={"style": 1.0}),
            {},
            "did not return style, which advantage.components names (it returned: score, letters)",
        ),
        (parts_of(baseline="greedy"), {"score": named_like_the_baseline}, "a name reserved for the baseline"),
    ],
)
def test_parts_that_do_not_fit_fail_the_attempt_with_their_names(tmp_path, parts, changes, says):
    replay = work(tmp_path, parts, **changes)
    assert not replay.inserted
    assert [reason for _, reason, _ in replay.failed] == [DropReason.FAILED_REWARD] * 3
    assert all(says in detail for _, _, detail in replay.failed)


def test_a_reward_without_the_part_that_dynamic_sampling_compares_has_no_score():
    parts = RewardParts.of(AdvantageConfig(), SAMPLING, compared="acc")
    trajectory = replay_group(ORDER, [0]).trajectories[0]
    with pytest.raises(RewardError, match=r"did not return acc, which rollout\.zero_variance_of names"):
        parts.check([replace(trajectory, rewards={"right": 1.0})])
    parts.check([replace(trajectory, rewards={"acc": 1.0})])


def test_the_greedy_completion_stops_where_a_sampled_one_does():
    greedy = parts_of(baseline="greedy").greedy
    assert greedy == replace(SAMPLING, temperature=0.0)


def test_a_group_whose_engine_did_not_say_what_it_drew_from_is_dropped_where_sampling_is_truncated(tmp_path):
    parts = RewardParts.of(AdvantageConfig(), replace(SAMPLING, temperature=1.0, top_p=0.9))
    replay = work(tmp_path, parts, engine=ListeningEngine())
    assert not replay.inserted
    assert {reason for _, reason, *_ in replay.failed} == {DropReason.FAILED_ENVIRONMENT}
