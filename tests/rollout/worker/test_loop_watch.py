"""A blocked event loop ends its worker; one that turns does not."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncrl.rollout.worker.loop_watch import LoopWatch

pytestmark = pytest.mark.timeout(400)


def test_whoever_holds_the_loop_is_named_and_the_worker_ends() -> None:
    said: list[str] = []
    ended = threading.Event()

    def end(text: str) -> None:
        said.append(text)
        ended.set()

    def an_environment_that_blocks() -> bool:
        return ended.wait(60)

    async def scenario() -> None:
        with LoopWatch(limit_s=0.5, turn_s=0.01, end=end):
            assert an_environment_that_blocks(), "nobody noticed"

    asyncio.run(scenario())
    (text,) = said
    assert "an_environment_that_blocks" in text and "ended.wait(60)" in text


def test_a_loop_that_waits_turns() -> None:
    said: list[str] = []

    async def scenario() -> None:
        with LoopWatch(limit_s=60.0, turn_s=0.001, end=said.append) as watch:
            first = watch._turns
            async with asyncio.timeout(60):
                while watch._turns < first + 20:
                    await asyncio.sleep(0)

    asyncio.run(scenario())
    assert said == []
    assert not [thread for thread in threading.enumerate() if thread.name == "loop-watch"]
