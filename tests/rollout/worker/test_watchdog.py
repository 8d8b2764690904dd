"""A worker that hangs is ended: its loop is blocked, or has ended while the process goes on."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncrl.errors import NoProgress
from asyncrl.rollout.host import EXIT_FAILED, EXIT_STOPPED
from asyncrl.rollout.worker.watchdog import EndWatch, LoopWatch

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


@pytest.mark.parametrize(
    ("error", "code"), [(NoProgress("the engine gave no token"), EXIT_FAILED), (None, EXIT_STOPPED)]
)
def test_a_thread_that_an_environment_left_behind_does_not_keep_the_process(error: Exception | None, code: int) -> None:
    said: list[tuple[str, int]] = []
    begun, ended = threading.Event(), threading.Event()

    def end(text: str, code: int) -> None:
        said.append((text, code))
        ended.set()  # here the process would be gone

    def a_teacher_that_never_answers() -> None:
        begun.set()
        assert ended.wait(60), "nobody noticed"

    async def scenario(watch: EndWatch) -> None:
        with watch:
            call = asyncio.create_task(asyncio.to_thread(a_teacher_that_never_answers))
            while not begun.is_set():  # Cancelled before its thread has it, the call would never be made.
                await asyncio.sleep(0.001)
            call.cancel()
            if error is not None:
                raise error

    watch = EndWatch(limit_s=0.05, end=end)
    if error is None:
        asyncio.run(scenario(watch))
    else:
        with pytest.raises(NoProgress):
            asyncio.run(scenario(watch))
    watch.over()
    ((text, given),) = said
    assert given == code and "a_teacher_that_never_answers" in text
    assert error is None or text.rstrip().splitlines()[-1].endswith("NoProgress: the engine gave no token")


def test_one_that_ends_in_time_is_left_alone() -> None:
    said: list[str] = []
    watch = EndWatch(limit_s=60.0, end=lambda text, code: said.append(text))
    with watch:
        pass
    watch.over()
    EndWatch().over()
    assert said == []
