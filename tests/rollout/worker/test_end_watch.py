"""A worker that has ended but whose process goes on is killed, with the worker's reason."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncrl.errors import NoProgress
from asyncrl.rollout.host import EXIT_FAILED, EXIT_STOPPED
from asyncrl.rollout.worker.end_watch import EndWatch

pytestmark = pytest.mark.timeout(400)


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
