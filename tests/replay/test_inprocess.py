from __future__ import annotations

import asyncio
import threading

import pytest

from asyncrl.errors import NoProgress, WireError
from asyncrl.evaluation.orders import EvalResult
from asyncrl.types import NO_VERSION, DropReason
from tests.replay.helpers import Clock, group, settings
from tests.replay.inprocess import InProcessReplay


def started(**options) -> InProcessReplay:
    replay = InProcessReplay(settings(), **options)
    learner = replay.learner()
    learner.restore(step=None, policy_version=NO_VERSION, snapshot=None)
    learner.publish(policy_version=0, parent=NO_VERSION)
    return replay


def test_a_whole_run_in_one_process_ends_with_stop() -> None:
    replay = started()
    learner, worker = replay.learner(), replay.rollout("w")

    async def work() -> int:
        worker.rendezvous().served(0, "f")
        made = 0
        while True:
            # Not longer: it may have looked for the newest version just before the learner announced it.
            acquired = await worker.acquire(slots=2, wait_s=1)
            if acquired.stop:
                await worker.close()
                return made
            for order in acquired.assignments:
                inserted = await worker.insert(group(order, [order.policy_version] * 3))
                assert inserted.status in ("accepted", "closed")  # what came ahead of the last step may come too late
                made += inserted.status == "accepted"
            newest = worker.rendezvous().watch(-1, 0).values.get("version", 0)
            worker.rendezvous().served(newest, "f")

    made: list[int] = []
    thread = threading.Thread(target=lambda: made.append(asyncio.run(work())), daemon=True)
    thread.start()
    for step in range(3):
        lease = learner.lease(step=step, rank=0, world=1, wait_s=30)
        assert len(lease.trajectories) == 4
        assert lease.samples[0].prompt_text == "what?"
        reply = learner.trained(step=step, policy_version=step + 1)
        learner.announce({"version": step + 1})
        learner.commit(step=step)
    assert reply.metrics["replay/trained"] == 6
    assert learner.snapshot()["step"] == 2
    learner.finish()
    thread.join(60)
    assert not thread.is_alive()
    assert made[0] >= 6
    assert learner.members() == []
    learner.close()


def test_waits_end_with_whom_they_waited_for() -> None:
    replay = started()
    worker = replay.rollout("w")
    with pytest.raises(NoProgress, match="w \\(serves -1"):
        replay.learner().lease(step=0, rank=0, world=1, wait_s=0.05)
    assert "serves -1" in asyncio.run(worker.acquire(slots=1, wait_s=0.05)).waiting_for
    replay.learner().evaluate(step=0, policy_version=0, eval_set="h", rows=2, chunk=2)
    with pytest.raises(NoProgress, match="2 rows"):
        replay.learner().wait_evaluations(wait_s=0.05)
    assert replay.learner().watch(revision=0, wait_s=0.01).revision == 0


def test_a_lease_ahead_waits_for_the_learner_without_giving_up() -> None:
    replay = started()
    learner, worker = replay.learner(), replay.rollout("w")

    async def make() -> None:
        worker.rendezvous().served(0, "f")
        for order in (await worker.acquire(slots=4, wait_s=30)).assignments:
            await worker.insert(group(order, [0] * 3))

    asyncio.run(make())
    learner.lease(step=0, rank=0, world=1, wait_s=30)
    learner.trained(step=0, policy_version=1)
    learner.lease(step=1, rank=0, world=1, wait_s=30)
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            learner.lease(step=2, rank=0, world=1, wait_s=0.2)
        except NoProgress as error:
            failed.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(0.6)
    assert thread.is_alive() and not failed
    learner.trained(step=1, policy_version=2)
    thread.join(60)
    assert len(failed) == 1


def test_groups_are_checked_as_on_the_wire() -> None:
    replay = started()
    worker = replay.rollout("w")

    async def work() -> None:
        worker.rendezvous().served(0, "f")
        order = (await worker.acquire(slots=1, wait_s=1)).assignments[0]
        bad = group(order, [0])
        bad.trajectories[0].behavior_logprobs[-1] = float("nan")
        with pytest.raises(WireError):
            await worker.insert(bad)
        await worker.fail(order, DropReason.FAILED_GENERATION, "nan")
        assert (await worker.acquire(slots=1, wait_s=1)).assignments[0].attempt == 1

    asyncio.run(work())


def test_a_worker_that_was_given_up_comes_back_by_itself() -> None:
    clock = Clock()
    replay = started(clock=clock, heartbeat_timeout_s=1.0)
    worker = replay.rollout("w")
    worker.rendezvous().served(0, "f")
    clock.now = 5.0
    replay.core.expire()
    assert replay.core.members() == []
    assert len(asyncio.run(worker.acquire(slots=1, wait_s=1)).assignments) == 1
    assert worker.rendezvous().watch(-1, 0.0).revision == 0


def test_evaluations_pass_through() -> None:
    replay = started()
    worker, learner = replay.rollout("w"), replay.learner()
    worker.served(0, "f")
    learner.evaluate(step=0, policy_version=0, eval_set="h", rows=2, chunk=2)
    order = asyncio.run(worker.acquire(slots=1, wait_s=1)).evaluations[0]
    result = EvalResult(job_id=order.job_id, chunk=0, attempt=0, version_min=0, version_max=0, scores=(1.0, 0.0))
    asyncio.run(worker.report_evaluation(result))
    (summary,) = learner.wait_evaluations(wait_s=1)
    assert summary.mean == 0.5
