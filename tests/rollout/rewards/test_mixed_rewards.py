"""Faults in the reward: in one group completions raise, hang, return NaN and end their process, many times."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from asyncrl.errors import HopelessRewardError
from asyncrl.rewards.pool import RewardPool
from asyncrl.rollout.groups.episode import GroupShape
from asyncrl.rollout.rewards.watch import RewardWatch
from asyncrl.types import DropReason
from tests.rewards import reward_functions
from tests.rewards.reward_functions import outcome_of
from tests.rollout.rollout_fakes import ScriptedReplay, make_worker, rows_file

GROUPS = 20

pytestmark = pytest.mark.timeout(900)


@pytest.mark.slow
@pytest.mark.unhurried
def test_every_group_comes_back_once_and_every_reward_is_that_of_its_completion(tmp_path: Path) -> None:
    replay, watch = ScriptedReplay(GROUPS), RewardWatch(1.0)
    seen: Counter[str] = Counter()

    async def scenario() -> dict[str, float]:
        async with RewardPool(f"{reward_functions.__file__}:chaotic", workers=2, timeout_s=3.0) as pool:

            async def score(texts, row, **_):
                seen.update(outcome_of(text) for text in texts)
                return await pool.score(texts, row)

            rows = rows_file(tmp_path / "rows.jsonl", GROUPS)
            shape = GroupShape(size=8, fewest=5, tries=3)
            await make_worker(replay, rows, score=score, watch=watch, shape=shape, wait_timeout_s=250.0).run()
            return pool.stats()

    stats = asyncio.run(scenario())
    assert set(seen) == {"raise", "nan", "exit", "score", "hang"}
    ended = [group.group_id for group in replay.inserted] + [assignment.group_id for assignment, _, _ in replay.failed]
    assert sorted(ended) == list(range(100, 100 + GROUPS))
    assert {reason for _, reason, _ in replay.failed} <= {DropReason.FAILED_REWARD, DropReason.INCOMPLETE}
    assert len(replay.inserted) > GROUPS / 2
    for group in replay.inserted:
        assert 5 <= len(group.trajectories) <= 8
        for trajectory, text in zip(group.trajectories, group.completion_texts, strict=True):
            assert outcome_of(text) == "score" and trajectory.reward == 1.0 + len(text)
    told = watch.stats()
    # Nobody is forgotten, and no completion that cannot be scored was; of a try in which all fail one reason is told.
    assert told["rewards_scored"] + told["rewards_failed"] == seen.total() and told["rewards_scored"] <= seen["score"]
    assert all(told[f"rewards_failed_{reason}"] >= 1 for reason in ("raised", "no_number", "exited", "timed_out"))
    assert stats["reward_restarts"] >= 2


def test_the_share_of_failures_that_is_too_much_ends_the_worker_with_its_reasons(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with RewardPool(f"{reward_functions.__file__}:mixed", workers=1, timeout_s=30.0) as pool:

            async def score(texts, row, **_):
                return await pool.score([("raise", "nan", "fine")[place % 3] for place, _ in enumerate(texts)], row)

            rows = rows_file(tmp_path / "rows.jsonl", 200)
            await make_worker(ScriptedReplay(200), rows, score=score, watch=RewardWatch(0.5)).run()

    with pytest.raises(HopelessRewardError, match=r"10[123] of the last .*raised \d+, no_number \d+"):
        asyncio.run(scenario())
