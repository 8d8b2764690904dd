"""What drops every group is named on the screen within 20 groups, and ends the run where nothing else can help."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.engines.fake import FakeEngine
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.errors import (
    HopelessRewardError,
    HopelessRunError,
    RequestError,
    RewardError,
)
from asyncrl.replay.codec.group import encode_group
from asyncrl.replay.protocol import InsertReply
from asyncrl.rollout.groups.filters import Filters
from asyncrl.rollout.groups.outcomes import HOPELESS, LATE, NAMED, GroupOutcomes
from asyncrl.rollout.rewards.parts import RewardParts
from asyncrl.rollout.rewards.watch import RewardWatch
from asyncrl.rollout.worker.process import REFUSALS
from asyncrl.schema import AdvantageConfig
from asyncrl.telemetry.live.tails import RewardWarnings
from asyncrl.types import DropReason, TrajectoryGroup
from tests.rollout.rollout_fakes import SAMPLING, ScriptedReplay, make_worker, prompt_source, reward_length, rows_file

GROUPS = 1200


def shown(folder: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a person reads of a worker's log."""
    view = RewardWarnings(folder)
    lines = (f"1 {each.levelname} {each.name}: {each.getMessage()}\n" for each in caplog.records)
    (folder / "rollout-0.log").write_text("".join(lines))
    return view.read()


class EncodingReplay(ScriptedReplay):
    """Encodes what is inserted, as the client does."""

    async def insert(self, group: TrajectoryGroup, lost: Any = None) -> InsertReply:
        encode_group(group)
        return await super().insert(group, lost)


class RejectingReplay(ScriptedReplay):
    async def insert(self, group: TrajectoryGroup, lost: Any = None) -> InsertReply:
        await super().insert(group, lost)
        return InsertReply(status="rejected", reason="the server wants 8 members")


class NaNEngine(FakeEngine):
    async def generate(self, request: Any) -> list[Any]:
        made = await super().generate(request)
        return [replace(one, logprobs=np.full_like(one.logprobs, np.nan)) for one in made]


class FullEngine(FakeEngine):
    async def generate(self, request: Any) -> list[Any]:
        raise RequestError("the prompt and the new tokens are too many")


class TooManyTurns(SingleTurn):
    async def run(self, prompt: Any, size: int, tools: Any) -> Any:
        made = await super().run(prompt, size, tools)
        return replace(made, trajectories=tuple(replace(one, turn_rewards=(1.0,) * 9) for one in made.trajectories))


def engine(kind: type[FakeEngine]) -> FakeEngine:
    made = kind(vocabulary=128)
    made.load_weights(0, {})
    return made


async def fails_for_one(texts: list[str], row: dict[str, Any], **_: Any) -> list[Any]:
    scores: list[Any] = await reward_length(texts, {})
    return [RewardError("the first is not scored"), *scores[1:]]


GDPO = RewardParts.of(AdvantageConfig(estimator="gdpo", components={"style": 1.0}), SAMPLING)
DROPPED: dict[str, tuple[Callable[[], dict[str, Any]], Any, type[Exception], str]] = {
    "a part of the reward is missing": (
        lambda: {"parts": GDPO}, ScriptedReplay, HopelessRewardError, "did not return style"
    ),
    "the reference's log-probs are missing": (
        lambda: {"parts": RewardParts(reference=True)}, ScriptedReplay, HopelessRewardError, "has no 'ref_logprobs'"
    ),
    "one member of every group fails": (
        lambda: {"score": fails_for_one, "watch": RewardWatch(0.5)}, ScriptedReplay, HopelessRunError, "3 of 4 members"
    ),
    "every group is filtered": (
        lambda: {"filters": Filters(((DropReason.FILTERED_ZERO_VARIANCE, lambda group: True),))},
        ScriptedReplay, HopelessRunError, "filtered_zero_variance",
    ),
    "every prompt is too long": (
        lambda: {"overlong": "drop", "max_prompt_tokens": 1}, ScriptedReplay, HopelessRunError, "over_length"
    ),
    "the engine cannot take any prompt": (
        lambda: {"engine": engine(FullEngine)}, ScriptedReplay, HopelessRunError, "new tokens are too many"
    ),
    "log-probs are no numbers": (
        lambda: {"engine": engine(NaNEngine)}, EncodingReplay, HopelessRunError, "must be finite"
    ),
    "trajectories cannot be sent": (
        lambda: {"environment": TooManyTurns()}, EncodingReplay, HopelessRunError, "one number per turn"
    ),
    "the server rejects every group": (lambda: {}, RejectingReplay, HopelessRunError, "the server wants 8 members"),
}  # fmt: skip


@pytest.mark.parametrize("case", DROPPED)
def test_what_drops_every_group_is_named_within_20_and_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    changes, replay_of, error, says = DROPPED[case]
    rows = rows_file(tmp_path / "rows.jsonl", 64)
    where = prompt_source(rows).where
    replay = replay_of(GROUPS)
    with pytest.raises(error) as ended:
        settings = {"watch": RewardWatch(0.5, where), "outcomes": GroupOutcomes(0.5, where=where), "slots": 1}
        asyncio.run(make_worker(replay, rows, **(settings | changes())).run())
    assert says in str(ended.value) and "reward.max_failure_share" in str(ended.value)
    assert isinstance(ended.value, REFUSALS), "a restart cannot help"
    first = shown(tmp_path, caplog)[0]
    assert says in first, "it was not named on the screen"
    if f"last {NAMED} groups" not in first:  # named even earlier
        assert "failed episode 1," in first


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_one_trained_group_keeps_the_run_and_a_share_of_one_always_does(tmp_path: Path, share: float) -> None:
    rows = rows_file(tmp_path / "rows.jsonl", 64)
    kept = Filters(((DropReason.FILTERED_ZERO_VARIANCE, lambda group: share == 1 or group.group_id % 900 != 0),))
    replay = ScriptedReplay(2 * GROUPS)
    asyncio.run(make_worker(replay, rows, filters=kept, outcomes=GroupOutcomes(share)).run())
    assert len(replay.inserted) + len(replay.failed) == 2 * GROUPS


def test_reasons_are_counted_repeated_at_powers_of_ten_and_never_twice(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = GroupOutcomes(1.0, where=lambda row: f"rows.jsonl:{row + 1}")

    def drop(count: int) -> None:
        for at in range(count):
            reason = DropReason.FILTERED if at % 4 else DropReason.FILTERED_ZERO_VARIANCE
            outcomes.dropped(reason, "keep: too easy" if at % 4 else "by rollout.drop_*", size=4, row=at)

    drop(NAMED - 1)
    outcomes.trained()
    assert not caplog.records, "one was trained on now and then"
    drop(1000)
    outcomes.trained()
    drop(1000)
    said = [record.getMessage() for record in caplog.records]
    assert [text.split()[4] for text in said] == ["20", "100", "1000"]
    assert "(15 filtered by keep, 5 filtered_zero_variance)" in said[0]
    assert "The last one, row 19 (rows.jsonl:20): keep: too easy. Look at the rewards" in said[0]


def test_many_workers_name_it_within_20_groups_together(caplog: pytest.LogCaptureFixture) -> None:
    workers = [GroupOutcomes(workers=5) for _ in range(5)]
    for each in workers * 4:
        each.dropped(DropReason.FILTERED, "keep", size=1)
    assert len(caplog.records) == 5


def test_faults_count_by_completions_and_end_at_the_share() -> None:
    outcomes = GroupOutcomes(0.5)
    for _ in range(25):
        outcomes.dropped(DropReason.INCOMPLETE, "3 of 4 members", size=4)
    with pytest.raises(HopelessRunError, match=r"26 groups .* more than reward.max_failure_share=0.5 of 200"):
        outcomes.dropped(DropReason.REJECTED, "other size", size=4)


def test_groups_that_come_too_late_are_named_and_end_nothing(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = GroupOutcomes(0.0)
    for _ in range(2 * HOPELESS):
        outcomes.dropped(LATE, "group 7 was assigned to another attempt", size=4)
    assert "20 late" in caplog.records[0].getMessage()


def test_a_group_of_one_member_counts_as_one() -> None:
    outcomes = GroupOutcomes(0.5)
    for _ in range(100):
        outcomes.dropped(DropReason.FAILED_REWARD, "none", size=1)
    with pytest.raises(HopelessRunError):
        outcomes.dropped(DropReason.FAILED_REWARD, "none", size=1)
