"""When a reward fails too often for the run to continue, and what is counted of its failures."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.errors import EpisodeError, GenerationError, HopelessRewardError, RewardError
from asyncrl.rollout.groups.filters import Filters
from asyncrl.rollout.rewards.failure_share import WINDOW
from asyncrl.rollout.rewards.watch import RewardWatch
from asyncrl.telemetry.live.tails import RewardWarnings
from asyncrl.types import DropReason
from tests.rollout.rollout_fakes import ScriptedReplay, make_worker, prompt_source, rows_file

FAILED = RewardError("my_reward.py:score: KeyError: 'answer'", "raised")


def test_half_of_the_window_may_fail_and_one_more_ends_the_run():
    watch = RewardWatch(0.5)
    for row in range(WINDOW):
        watch.saw(row, 1, [FAILED])
    with pytest.raises(HopelessRewardError, match="101 of the last 200"):
        watch.saw(7, 0, [FAILED])


def test_it_ends_as_soon_as_no_success_could_change_the_verdict():
    watch = RewardWatch(0.5)
    for row in range(100):
        watch.saw(row, 0, [FAILED])
    with pytest.raises(HopelessRewardError, match="101 of the last 101"):
        watch.saw(100, 0, [FAILED])


def test_old_failures_are_forgotten_and_counted_for_ever():
    watch = RewardWatch(0.25)
    for row in range(20):
        watch.saw(row, 0, [FAILED, RewardError("took too long", "timed_out")])
        watch.saw(row, 4 * WINDOW, [])
    assert watch.stats() == {
        "rewards_scored": 20 * 4 * WINDOW,
        "rewards_failed": 40,
        "rewards_failed_raised": 20,
        "rewards_failed_timed_out": 20,
    }


def test_what_the_engine_could_not_generate_is_no_failure_of_the_reward():
    watch = RewardWatch(0.0)
    watch.saw(0, 3, [GenerationError("out of memory")])
    assert watch.stats()["rewards_failed"] == 0


def test_a_share_of_one_never_ends_a_run_and_an_environment_counts_as_itself():
    watch = RewardWatch(1.0)
    for row in range(3 * WINDOW):
        watch.saw(row, 0, [EpisodeError("it raised")])
    assert watch.stats()["rewards_failed_environment"] == 3 * WINDOW


def test_why_episodes_fail_is_logged_now_and_then_and_read_by_whoever_shows_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch, view = RewardWatch(1.0, lambda row: f"rows.jsonl:{row + 1}"), RewardWarnings(tmp_path)
    for row in range(150):
        watch.saw(row, 0, [EpisodeError("it\nraised"), FAILED])
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"failed episode {n}, row {n - 1} (rows.jsonl:{n}): it raised" for n in (1, 10, 100)]
    lines = (f"1 {each.levelname} {each.name}: {each.getMessage()}\n" for each in caplog.records)
    (tmp_path / "rollout-0.log").write_text("".join(lines))
    assert view.read() == [f"rollout-0: {text}" for text in said]


def test_a_reward_that_never_works_ends_its_worker_with_the_message_the_row_and_the_line(tmp_path: Path):
    rows = rows_file(tmp_path / "rows.jsonl", 64, bad=tuple(range(64)))
    watch = RewardWatch(0.5, prompt_source(rows).where)
    with pytest.raises(HopelessRewardError) as ended:
        asyncio.run(make_worker(ScriptedReplay(64), rows, watch=watch).run())
    said = str(ended.value)
    row = int(said.split("The last one, row ")[1].split()[0])
    assert f"row {row} ({rows}:{row + 1}): row {row} is bad" in said
    assert "reward.max_failure_share=0.5" in said and "\n" not in said


def test_groups_that_a_filter_drops_do_not_count(tmp_path: Path):
    rows = rows_file(tmp_path / "rows.jsonl", 64)
    replay, watch = ScriptedReplay(64), RewardWatch(0.0)
    filters = Filters(((DropReason.FILTERED_ZERO_VARIANCE, lambda group: True),))
    asyncio.run(make_worker(replay, rows, watch=watch, filters=filters).run())
    assert [reason for _, reason, _ in replay.failed] == [DropReason.FILTERED_ZERO_VARIANCE] * 64
    assert watch.stats() == {"rewards_scored": 256, "rewards_failed": 0}
