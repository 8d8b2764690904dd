"""Server and clients over real sockets on loopback: what each request does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import Future

import pytest

from asyncrl.errors import ConfigError, NoProgress, WireError
from asyncrl.evaluation.orders import EvalResult
from asyncrl.replay import serving
from asyncrl.replay.client.client import decode_lease
from asyncrl.replay.client.requests import Response
from asyncrl.replay.codec import wire
from asyncrl.replay.core.live.metrics import RolloutRates
from asyncrl.replay.core.live.workers import Workers
from asyncrl.replay.server.router import router
from asyncrl.types import DropReason
from tests.replay.helpers import ClockAhead, group, replay_config, running_server, same_trajectory, settings
from tests.replay.served import Run, ready

pytestmark = pytest.mark.timeout(400)


def test_groups_travel_from_workers_to_the_learner_and_steps_are_committed(run) -> None:
    version = run.start()
    client = run.worker()
    sent = {}

    async def work() -> None:
        for order in await ready(client):
            sent[order.group_id] = group(order, [version] * 3)
            assert (await client.insert(sent[order.group_id])).status == "accepted"

    asyncio.run(work())
    lease = run.learner.lease(step=0, rank=0, world=1, wait_s=30)
    for (position, t), arrived in lease.trajectories.items():
        assert same_trajectory(sent[lease.plan.groups[position].group_id].trajectories[t], arrived)
    assert lease.samples[0].completion_texts == ("answer 0 ü", "answer 1 ü")
    assert lease.plan.groups[0].worker == "w"
    reply = run.learner.trained(step=0, policy_version=1)
    assert reply.metrics["replay/trained"] == 2
    run.learner.commit(step=0)
    assert run.learner.snapshot()["step"] == 0
    assert [member.worker for member in run.learner.members()] == ["w"]


@pytest.mark.parametrize(("wanted", "given"), [(0, 0), (1, 1), (1_000_000, 2)])
def test_rank_0_gets_as_many_whole_groups_as_it_wants_samples(wanted: int, given: int) -> None:
    config = replay_config()
    with running_server(config, settings()), contextlib.closing(Run(config, samples=wanted)) as run:
        version = run.start()
        client = run.worker()

        async def work() -> None:
            for order in await ready(client):
                await client.insert(group(order, [version] * 3))

        asyncio.run(work())
        assert len(run.learner.lease(step=0, rank=0, world=1, wait_s=30).samples) == given


def test_members_that_come_one_by_one_reach_every_rank_as_groups() -> None:
    config, admission = replay_config(), settings(by_sample=True, group_size=3)
    with running_server(config, admission), contextlib.closing(Run(config, admission)) as run:
        version = run.start()
        client, sent = run.worker(), {}

        async def work() -> None:
            for order in reversed(await ready(client, slots=12)):
                sent[order.group_id] = group(order, [version] * 3, size=1)
                assert (await client.insert(sent[order.group_id])).status == "accepted"

        asyncio.run(work())
        lease = run.learner.lease(step=0, rank=0, world=1, wait_s=30)
        assert [plan.group_id for plan in lease.plan.groups] == [9, 6], "as they became whole"
        for (position, member), arrived in lease.trajectories.items():
            first = lease.plan.groups[position].group_id
            assert same_trajectory(sent[first + member].trajectories[0], arrived)
        assert len(lease.trajectories) == 6
        assert [len(sample.completion_texts) for sample in lease.samples] == [3, 3]
        assert run.learner.trained(step=0, policy_version=1).metrics["replay/trained"] == 6


def test_an_insert_sent_twice_is_stored_once(run) -> None:
    version = run.start()
    client = run.worker()

    async def work() -> list[str]:
        made = group((await ready(client))[0], [version])
        return [(await client.insert(made)).status for _ in range(2)]

    assert asyncio.run(work()) == ["accepted", "duplicate"]


def test_long_polls_answer_at_once_when_there_is_something_and_at_their_deadline_otherwise(run) -> None:
    client = run.worker()

    async def work() -> None:
        start = time.monotonic()
        nothing = await client.acquire(slots=1, wait_s=0.3)
        assert 0.25 < time.monotonic() - start < 30
        assert "not published" in nothing.waiting_for
        board = client.rendezvous().watch(0, 0.2)
        assert board.revision == 0
        start = time.monotonic()
        pending = asyncio.create_task(client.acquire(slots=1, wait_s=55))
        watching = asyncio.create_task(asyncio.to_thread(client.rendezvous().watch, 0, 55.0))
        await asyncio.to_thread(run.start)
        client.rendezvous().served(0, "f")
        assert len((await pending).assignments) == 1
        await asyncio.to_thread(run.learner.announce, {"a": [1, "b"]})
        assert (await watching).values == {"a": [1, "b"]}
        assert time.monotonic() - start < 50, "both would have waited for an answer until their deadline"

    asyncio.run(work())


def test_a_lease_that_gets_no_group_says_whom_it_waited_for(run) -> None:
    run.start()
    with pytest.raises(NoProgress, match="no rollout worker is connected"):
        run.learner.lease(step=0, rank=0, world=1, wait_s=0.3)


PATIENCE_S = 60.0


class PatientRun(Run):
    """Whose learner's requests wait for up to `PATIENCE_S` of a clock that the test moves."""

    def __init__(self, config, clock: ClockAhead) -> None:
        super().__init__(config)
        self._clock = clock

    async def make(self, worker, version: int) -> None:
        worker.rendezvous().served(version, "f")
        made, deadline = 0, time.monotonic() + 30
        while made < self.admission.groups_per_step and time.monotonic() < deadline:
            for order in (await worker.acquire(slots=4, wait_s=30)).assignments:
                made += (await worker.insert(group(order, [version] * 3))).status == "accepted"

    def lease(self, step: int) -> Future[Response]:
        """It is at the server when this returns."""
        asked = self.learner._connection.request("lease", [step, 0, 1, PATIENCE_S, 0])
        self.learner.members()
        return asked

    def patience_ends(self) -> None:
        """For those that wait at the server now. It has seen it when this returns."""
        self._clock.ahead_s += PATIENCE_S + 1
        board = self.learner.watch(revision=-1, wait_s=0)
        self.learner.watch(revision=board.revision, wait_s=0)  # It waits too: answered after those that came before.


def test_a_step_leased_ahead_is_waited_for_as_long_as_the_learner_trains_the_step_before(monkeypatch) -> None:
    clock = ClockAhead()
    monkeypatch.setattr(serving, "awake_clock", lambda config: clock)
    config = replay_config(heartbeat_timeout_s=1000.0)
    admission = settings(max_staleness=1, pipeline_depth=0)
    with running_server(config, admission), contextlib.closing(PatientRun(config, clock)) as run:
        run.start()
        worker = run.worker()
        asyncio.run(run.make(worker, 0))
        run.learner.lease(step=0, rank=0, world=1, wait_s=30)
        ahead = run.lease(1)
        for _ in range(3):
            run.patience_ends()  # In a train step longer than it; no group can arrive meanwhile.
        assert not ahead.done()
        run.learner.trained(step=0, policy_version=1)
        asyncio.run(run.make(worker, 1))
        assert decode_lease(ahead.result(timeout=30), 0).plan.step == 1
        dry = run.lease(2)
        run.patience_ends()
        run.learner.trained(step=1, policy_version=2)
        for _ in range(2):  # Counted anew from when the step before was trained.
            assert not dry.done()
            run.patience_ends()
        with pytest.raises(NoProgress, match="no group and no token"):
            dry.result(timeout=30)


def test_a_cancelled_acquire_gives_its_orders_back(run) -> None:
    client = run.worker()

    async def work() -> None:
        waiting = asyncio.create_task(client.acquire(slots=4, wait_s=20))
        await asyncio.sleep(0)
        client.rendezvous().watch(-1, 0)  # Answered: so what was sent before it is at the server.
        waiting.cancel()
        await asyncio.to_thread(run.start)
        client.rendezvous().served(0, "f")
        # Answered when those that wait are asked again, the older acquire first: so it has been given its orders.
        (met := client.rendezvous()).watch(met.watch(-1, 0.0).revision, 0.05)
        attempts = {}
        deadline = time.monotonic() + 30
        while len(attempts) < 4 and time.monotonic() < deadline:
            for order in (await client.acquire(slots=4, wait_s=0.5)).assignments:
                attempts[order.group_id] = order.attempt
        # More than 1 where the machine was so busy that the worker was taken for silent.
        assert attempts.keys() == {0, 1, 2, 3} and min(attempts.values()) >= 1

    asyncio.run(work())


def test_evaluation_runs_through_the_same_workers(run) -> None:
    version = run.start()
    client = run.worker()
    job = run.learner.evaluate(step=0, policy_version=version, eval_set="heldout", rows=3, chunk=2)
    with pytest.raises(NoProgress, match="3 rows"):
        run.learner.wait_evaluations(wait_s=0.1)

    async def work() -> None:
        client.rendezvous().served(0, "f")
        done = 0
        while done < 3:
            for order in (await client.acquire(slots=1, wait_s=30)).evaluations:
                rows = order.stop - order.start
                done += rows
                await client.report_evaluation(
                    EvalResult(
                        job_id=order.job_id,
                        chunk=order.chunk,
                        attempt=order.attempt,
                        version_min=version,
                        version_max=version,
                        scores=(1.0,) * rows,
                    )
                )

    asyncio.run(work())
    (summary,) = run.learner.wait_evaluations(wait_s=30)
    assert (summary.job_id, summary.count, summary.mean) == (job, 3, 1.0)


def test_failures_statistics_and_the_blocking_rendezvous_reach_the_server(run, monkeypatch) -> None:
    monkeypatch.setattr(RolloutRates, "SPAN_S", 0.0)  # Every row has a rate of its own.
    run.start()
    beats: list[float] = []

    def stats() -> dict[str, float]:
        beats.append(time.monotonic())
        return {"generated_tokens": 50.0, "waiting_s": 0.0}

    client = run.worker(stats=stats)
    rendezvous = client.rendezvous()
    rendezvous.served(0, "f")
    assert rendezvous.watch(-1, 0.0).revision == 0

    async def work() -> None:
        order = (await client.acquire(slots=1, wait_s=30)).assignments[0]
        await client.fail(order, DropReason.OVER_LENGTH, "too long")
        while len(beats) < 3:
            await asyncio.sleep(0.02)
        for order in (await client.acquire(slots=2, wait_s=30)).assignments:
            await client.insert(group(order, [0]))

    asyncio.run(work())
    run.learner.lease(step=0, rank=0, world=1, wait_s=30)
    metrics = run.learner.trained(step=0, policy_version=1).metrics
    assert metrics["replay/dropped_over_length"] == 1
    assert metrics["perf/generated_tokens_per_s"] > 0


def test_byte_credits_hold_a_producer_back_until_there_is_room() -> None:
    config = replay_config(max_bytes=4000)
    admission = settings(groups_per_step=1, pipeline_depth=2, max_staleness=2, group_size=1)
    with running_server(config, admission), contextlib.closing(Run(config, admission)) as run:
        run.start()
        client = run.worker()

        async def work() -> None:
            orders = await ready(client)
            assert len(orders) == 3
            big = [group(order, [0] * 300, size=1) for order in orders]  # 2.8 KB each
            await client.insert(big[0])
            await asyncio.to_thread(run.learner.lease, step=0, rank=0, world=1, wait_s=30)
            await client.insert(big[1])
            held = asyncio.create_task(client.insert(big[2]))
            await asyncio.sleep(0.5)
            assert not held.done()
            await asyncio.to_thread(run.learner.trained, step=0, policy_version=1)
            await asyncio.to_thread(run.learner.commit, step=0)
            assert (await asyncio.wait_for(held, 40)).status == "accepted"

        asyncio.run(work())


def test_what_cannot_be_packed_fails_its_caller_only(run) -> None:
    with pytest.raises(WireError):
        run.learner.announce({"x": object()})
    run.start()
    with pytest.raises(WireError, match="limit"):
        run.learner.announce({"x": b"0" * (wire.MAX_REQUEST_BYTES + 1)})
    run.learner.announce({"x": 1})


def test_a_request_that_python_cannot_show_is_refused_and_the_server_goes_on(run, monkeypatch) -> None:
    run.start()
    client = run.worker()

    def show(*values: object, **named: object) -> None:
        raise RecursionError("lists in lists in lists")

    with monkeypatch.context() as patched:
        patched.setattr(Workers, "note", show)
        with pytest.raises(WireError, match="'served' is nested too deep"):
            client.rendezvous().served(0, "f")
    client.rendezvous().served(0, "f")


def test_an_open_address_without_keys_is_refused() -> None:
    for address in ("tcp://*:5577", "tcp://0.0.0.0:5577", "tcp://10.1.2.3:5577", "nonsense"):
        with pytest.raises(ConfigError), router(replay_config(address=address, keys="")):
            pass
