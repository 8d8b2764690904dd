from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from asyncrl.rollout.filters import make_filters, why_dropped
from asyncrl.schema import RolloutConfig
from asyncrl.types import DropReason, Trajectory
from tests.replay.helpers import group as replay_group
from tests.replay.test_order import ORDER
from tests.rollout.rollout_fakes import ScriptedReplay, make_worker, rows_file


def made(*members: tuple[float, str]):
    base: Trajectory = replay_group(ORDER, [0]).trajectories[0]
    trajectories = tuple(replace(base, reward=reward, finish_reason=end) for reward, end in members)
    return replace(replay_group(ORDER, [0]), trajectories=trajectories)


FLAT = made((1.0, "stop"), (1.0, "stop"))
MIXED = made((0.0, "stop"), (1.0, "length"))
CUT = made((0.0, "length"), (1.0, "length"))


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        ({}, [None, None, None]),
        ({"drop_zero_variance": True}, [DropReason.FILTERED_ZERO_VARIANCE, None, None]),
        ({"drop_truncated": "any"}, [None, DropReason.OVER_LENGTH, DropReason.OVER_LENGTH]),
        ({"drop_truncated": "all"}, [None, None, DropReason.OVER_LENGTH]),
    ],
)
def test_each_filter_drops_what_it_says(settings, reasons):
    filters = make_filters(RolloutConfig(**settings))
    assert [why_dropped(filters, group) for group in (FLAT, MIXED, CUT)] == reasons


@pytest.mark.timeout(30)
def test_a_worker_reports_what_it_filters_and_inserts_the_rest(tmp_path):
    async def scenario():
        replay = ScriptedReplay(20)
        filters = ((DropReason.FILTERED_ZERO_VARIANCE, lambda group: group.group_id % 2 == 0),)
        await make_worker(replay, rows_file(tmp_path / "rows.jsonl", 10), filters=filters).run()
        return replay

    replay = asyncio.run(scenario())
    assert {group.group_id % 2 for group in replay.inserted} == {1}
    assert {assignment.group_id % 2 for assignment, _, _ in replay.failed} == {0}
    assert {reason for _, reason, _ in replay.failed} == {DropReason.FILTERED_ZERO_VARIANCE}
    assert len(replay.inserted) + len(replay.failed) == 20
