"""Members of a group that fail are generated again alone, and left out if enough others exist."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.fake import FakeEngine
from asyncrl.errors import GenerationError, RewardError
from asyncrl.rewards.score import Outcome, RewardScore
from asyncrl.rollout.groups.episode import GroupShape
from asyncrl.types import Completion, DropReason
from tests.rollout.rollout_fakes import ScriptedReplay, make_worker, rows_file

pytestmark = pytest.mark.timeout(400)

SIZE, TRIES = 4, 3


class Scorer:
    """Fails the members that `fails(call, place)` names; `call` counts from 0."""

    def __init__(self, fails: Callable[[int, int], bool]) -> None:
        self.fails = fails
        self.sizes: list[int] = []
        self.scored: list[str] = []

    async def __call__(self, texts: list[str], row: dict, **_: object) -> list[Outcome]:
        call = len(self.sizes)
        self.sizes.append(len(texts))
        outcomes: list[Outcome] = []
        for place, text in enumerate(texts):
            if self.fails(call, place):
                outcomes.append(RewardError(f"no score for {place}"))
            else:
                self.scored.append(text)
                outcomes.append(RewardScore(value=float(len(self.scored))))
        if all(isinstance(outcome, RewardError) for outcome in outcomes):
            raise RewardError("no score for any")  # as the reward pool does
        return outcomes


class FlakyEngine(FakeEngine):
    """Fails every request after the first."""

    def __init__(self) -> None:
        super().__init__(vocabulary=128)
        self.load_weights(0, {})
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.requests.append(request)
        if len(self.requests) > 1:
            raise GenerationError("out of memory")
        return await super().generate(request)


def make_one(tmp_path, scorer: Scorer, fewest: int = SIZE, **changes) -> ScriptedReplay:
    async def scenario() -> ScriptedReplay:
        replay = ScriptedReplay(1)
        shape = GroupShape(size=SIZE, fewest=fewest, tries=TRIES)
        await make_worker(replay, rows_file(tmp_path / "rows.jsonl", 4), score=scorer, shape=shape, **changes).run()
        return replay

    return asyncio.run(scenario())


def test_only_the_members_that_failed_are_made_again(tmp_path) -> None:
    scorer = Scorer(lambda call, place: call == 0 and place in (1, 3))
    (group,) = make_one(tmp_path, scorer).inserted
    assert scorer.sizes == [4, 2]
    assert group.lost is None, "it has all members"
    assert group.completion_texts == tuple(scorer.scored)
    assert [t.reward for t in group.trajectories] == [1.0, 2.0, 3.0, 4.0]
    assert len({t.token_ids.tobytes() for t in group.trajectories}) == SIZE, "a member was sampled as before"


@pytest.mark.parametrize(("fewest", "trained"), [(SIZE, False), (3, False), (2, True), (1, True)])
def test_a_group_is_closed_with_enough_members_after_the_last_try_or_given_up(tmp_path, fewest, trained) -> None:
    scorer = Scorer(lambda call, place: call > 0 or place in (0, 2))
    replay = make_one(tmp_path, scorer, fewest)
    assert scorer.sizes == [4, 2, 2]
    if trained:
        (group,) = replay.inserted
        assert len(group.trajectories) == len(group.completion_texts) == 2
        (lost,) = replay.samples
        assert (lost.group_id, lost.dropped, lost.prompt) == (group.group_id, "failed_reward", group.prompt_text)
        assert lost.detail == "2 of 4 members are missing, the others are kept; the last failure: no score for any"
    else:
        ((_, reason, detail),) = replay.failed
        assert reason is DropReason.INCOMPLETE
        assert f"2 of 4 members after 3 tries, {fewest} are needed; the last failure: no score" in detail


def test_a_group_without_any_member_fails_as_a_whole_and_may_go_to_another_worker(tmp_path) -> None:
    scorer = Scorer(lambda call, place: True)
    ((_, reason, detail),) = make_one(tmp_path, scorer, fewest=2).failed
    assert reason is DropReason.FAILED_REWARD
    assert scorer.sizes == [4]
    assert "no score for any" in detail


def test_a_generation_that_fails_for_the_missing_members_is_one_of_the_tries(tmp_path) -> None:
    scorer, engine = Scorer(lambda call, place: place == 0), FlakyEngine()
    replay = make_one(tmp_path, scorer, fewest=3, engine=engine)
    assert [request.n for request in engine.requests] == [4, 1, 1]
    assert len({request.request_id for request in engine.requests}) == TRIES
    assert len({request.seed for request in engine.requests}) == TRIES
    (group,) = replay.inserted
    assert len(group.trajectories) == 3
