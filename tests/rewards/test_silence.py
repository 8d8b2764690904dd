"""A reward or judge that does not answer is reported long before its calls are overdue."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from asyncrl.rewards import silence
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.silence import Silence
from asyncrl.telemetry.live.tails import RewardWarnings
from tests.replay.helpers import Clock

HANGS = f"{Path(__file__).with_name('reward_functions.py')}:by_command"


def said_in(seconds: int, quiet: Silence, clock: Clock) -> list[str]:
    found = []
    for _ in range(seconds):
        clock.now += 1
        found.append(quiet.look(3))
    return [text for text in found if text]


def test_it_is_told_once_and_then_after_twice_as_long_and_when_it_is_over() -> None:
    clock = Clock()
    quiet = Silence("the judge", clock)
    clock.now += 100
    assert quiet.look(0) == "", "nobody has asked"
    assert said_in(4, quiet, clock) == []
    (told,) = said_in(7, quiet, clock)
    assert told.startswith("waiting for the judge since ") and told.endswith(" (5 s): none of 3 calls was answered")
    quiet.heard()
    assert quiet.look(3) == "no longer waits for the judge, after 11 s"
    assert said_in(9, quiet, clock) == []
    assert len(said_in(60, quiet, clock)) == 1


def test_a_pool_says_it_before_the_deadline_and_whoever_shows_the_run_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(silence, "PATIENCE_S", 0.3)

    async def scenario() -> None:
        async with RewardPool(HANGS, workers=1, timeout_s=60) as pool:
            call = asyncio.create_task(pool.score(["a"], {"prompt": "p", "do": "hang"}))
            async with asyncio.timeout(50):
                while not caplog.records:
                    await asyncio.sleep(0.05)
            call.cancel()

    warnings = RewardWarnings(tmp_path)
    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    (record, *_) = caplog.records
    (tmp_path / "rollout-0.log").write_text(f"12:00 WARNING {record.name}: {record.getMessage()}\n")
    (shown,) = warnings.read()
    assert shown.startswith(f"rollout-0: waiting for the reward {HANGS} since ") and "reward.timeout_s=60" in shown
