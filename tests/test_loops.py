from __future__ import annotations

import asyncio

import pytest

from asyncrl.loops import together


@pytest.mark.parametrize("cancelled", [False, True])
async def test_when_one_task_fails_or_all_are_given_up_none_goes_on(cancelled: bool) -> None:
    ended: list[str] = []

    async def works() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("works")

    async def fails() -> None:
        await asyncio.sleep(0)
        if not cancelled:
            raise ValueError("it fails")
        await asyncio.Event().wait()

    whole = asyncio.create_task(together(asyncio.create_task(works()), asyncio.create_task(fails())))
    await asyncio.sleep(0)
    if cancelled:
        await asyncio.sleep(0)
        whole.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else ValueError):
        await whole
    assert ended == ["works"]


async def test_results_come_in_the_order_of_the_tasks() -> None:
    async def later(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    assert await together(*(asyncio.create_task(later(each)) for each in (0.02, 0.0))) == [0.02, 0.0]
