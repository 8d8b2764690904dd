from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from asyncrl.errors import ReplayError
from asyncrl.replay.client.futures import Futures


def made(count: int) -> list[Future]:
    return [Future() for _ in range(count)]


def test_what_threads_have_done_is_awaited_in_the_loop() -> None:
    landing, futures = Futures(), made(40)

    def finish(mine: list[Future]) -> None:
        for future in mine:
            future.set_result(futures.index(future))

    async def everything() -> list[int]:
        waiting = [asyncio.create_task(landing.of(future)) for future in futures]
        threads = [threading.Thread(target=finish, args=(futures[start::4],)) for start in range(4)]
        for thread in threads:
            thread.start()
        return await asyncio.wait_for(asyncio.gather(*waiting), 60)

    assert asyncio.run(everything()) == list(range(40))


def test_one_wake_up_of_the_loop_brings_all_that_were_done_before_it(monkeypatch) -> None:
    landing, futures, wakes = Futures(), made(5), []

    async def everything() -> list[int]:
        loop = asyncio.get_running_loop()
        waiting = [asyncio.create_task(landing.of(future)) for future in futures]
        await asyncio.sleep(0)  # The tasks begin to wait.
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *call: (wakes.append(call), wake(*call)))
        for number, future in enumerate(futures):
            future.set_result(number)
        return await asyncio.wait_for(asyncio.gather(*waiting), 60)

    assert asyncio.run(everything()) == list(range(5))
    assert len(wakes) == 1


def test_failures_arrive_and_a_caller_that_has_gone_disturbs_nobody() -> None:
    landing, (gone, failed, fine) = Futures(), made(3)

    async def everything() -> int:
        waiting = [asyncio.create_task(landing.of(future)) for future in (gone, failed, fine)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        gone.set_result(1)
        failed.set_exception(ReplayError("no"))
        fine.set_result(3)
        with pytest.raises(ReplayError, match="no"):
            await waiting[1]
        assert waiting[0].cancelled()
        return await asyncio.wait_for(waiting[2], 60)

    assert asyncio.run(everything()) == 3


def test_what_is_done_after_its_loop_has_ended_does_not_keep_the_next_loop_waiting() -> None:
    landing, (late, later) = Futures(), made(2)

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(landing.of(late), 0.01)

    async def go_on() -> int:
        waiting = asyncio.create_task(landing.of(later))
        await asyncio.sleep(0)
        later.set_result(2)
        return await asyncio.wait_for(waiting, 60)

    asyncio.run(give_up())
    late.set_result(1)
    assert asyncio.run(go_on()) == 2
