"""The admission window with a simulated engine, without vLLM."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.engines.vllm.admission import AdmissionQueue, AdmissionWindow


class MadeUpKv:
    """Every sequence in flight takes a block more per step until it is done; past the last block it preempts."""

    def __init__(self, blocks: int, length: int) -> None:
        self.blocks, self.length = blocks, length
        self.ages: list[int] = []
        self.preemptions = 0
        self.wasted = 0
        """Tokens computed for sequences that were preempted."""
        self.finished = 0

    def step(self) -> None:
        self.ages = [age + 1 for age in self.ages]
        while sum(self.ages) > self.blocks:
            self.wasted += self.ages.pop()
            self.preemptions += 1
        self.finished += sum(age >= self.length for age in self.ages)
        self.ages = [age for age in self.ages if age < self.length]


def run(window: AdmissionWindow | None, steps: int = 600, blocks: int = 400, length: int = 40) -> MadeUpKv:
    kv = MadeUpKv(blocks, length)
    for _ in range(steps):
        limit = window.limit if window is not None else 64
        kv.ages += [0] * max(0, limit - len(kv.ages))
        before = kv.finished
        kv.step()
        if window is not None:
            window.observe(len(kv.ages), sum(kv.ages) / kv.blocks, kv.preemptions)
            for _ in range(kv.finished - before):
                window.finished(limit)
    return kv


def test_under_pressure_the_window_saves_the_wasted_work():
    free, window = run(None), AdmissionWindow(64)
    window.begin(400, 40)
    assert window.limit == 10
    bounded = run(window)
    assert bounded.wasted < free.wasted / 10
    assert bounded.finished > 0.85 * free.finished, "although what is preempted costs nothing here"


def test_without_pressure_the_window_stays_wide_open():
    window = AdmissionWindow(64)
    kv = run(window, blocks=2 * 64 * 40)
    assert window.limit == 64 and kv.preemptions == 0


def test_one_crowded_moment_is_one_cut_and_the_window_grows_back_only_while_it_binds():
    window = AdmissionWindow(64)
    for _ in range(20):
        window.observe(64, usage=0.99, preemptions=0)
    assert window.limit == 48, "the cut must take effect before the next one"
    window.observe(48, usage=0.1, preemptions=0)
    for in_flight in (48, 40) * 48:
        window.finished(in_flight)
    assert window.limit == 49, "a whole full window must finish for one more place"
    window.observe(49, usage=0.85, preemptions=0)
    for _ in range(60):
        window.finished(49)
    assert window.limit == 49, "between the watermarks it stays"
    window.observe(49, usage=0.5, preemptions=1)
    assert window.limit == 36, "a preemption is as good as a full cache"


def test_a_window_that_began_narrow_widens_with_every_finished_sequence_until_the_first_cut():
    window = AdmissionWindow(64)
    window.begin(kv_tokens=4000, longest=500)
    assert window.limit == 8
    for _ in range(20):
        window.finished(window.limit)
    assert window.limit == 28
    window.observe(28, usage=0.95, preemptions=0)
    assert window.limit == 21


def test_the_window_never_closes_for_good():
    window = AdmissionWindow(2)
    for _ in range(50):
        window.observe(1, usage=1.0, preemptions=0)
    assert window.limit == 1


async def test_places_go_to_the_oldest_first_and_none_while_the_queue_is_closed():
    queue = AdmissionQueue(AdmissionWindow(2))
    entered: list[int] = []

    async def enter(ticket: int) -> None:
        await queue.enter(ticket)
        entered.append(ticket)

    tasks = [asyncio.create_task(enter(ticket)) for ticket in (5, 6, 9, 3, 7)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert entered == [5, 6] and queue.waiting == 3
    queue.close()
    queue.leave()
    await asyncio.sleep(0)
    assert entered == [5, 6] and queue.in_flight == 1
    queue.open()
    await asyncio.sleep(0)
    assert entered == [5, 6, 3]
    tasks[4].cancel()
    queue.leave()
    queue.leave()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert entered == [5, 6, 3, 9] and queue.in_flight == 1 and queue.waiting == 0


@pytest.mark.parametrize("let_in", [False, True])
async def test_who_gives_up_waiting_takes_no_place_with_him(let_in):
    queue = AdmissionQueue(AdmissionWindow(1))
    await queue.enter(0)
    waiting = asyncio.create_task(queue.enter(1))
    await asyncio.sleep(0)
    if let_in:
        queue.leave()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert queue.in_flight == (0 if let_in else 1)
    if not let_in:
        queue.leave()
    await queue.enter(2)
    assert queue.in_flight == 1
