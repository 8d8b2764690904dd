"""A server with a journal: what it says it has, it has; killed and started again, its peers go on where they were."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from asyncrl.balance import UPDATES, shard_step
from asyncrl.errors import FencedError, NoProgress
from asyncrl.evaluation.orders import EvalAssignment, EvalResult, EvalSummary
from asyncrl.replay import serving
from asyncrl.replay.client import connection
from asyncrl.replay.client.client import RolloutClient
from asyncrl.replay.journal.durable import recover
from asyncrl.types import NO_VERSION
from tests.replay.helpers import SOON_SILENT_S, ClockAhead, group, same_trajectory
from tests.replay.lives import Server
from tests.replay.peers import begin, fill
from tests.waiting import until

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


@pytest.mark.parametrize("server", [{"heartbeat_timeout_s": 4.0}], indirect=True)
def test_a_reply_leaves_only_after_the_sync_that_covers_it_and_heartbeats_go_on(server: Server) -> None:
    learner, worker = begin(server)
    orders = asyncio.run(worker.acquire(slots=2, wait_s=30)).assignments
    server.disk.hold()
    with ThreadPoolExecutor() as pool:
        pending = pool.submit(asyncio.run, worker.insert(group(orders[0], [0] * 3)))
        assert server.disk.waiting.wait(30)
        time.sleep(5.0)  # Longer than heartbeat_timeout_s: a server that waited for the disk would have been given up.
        assert not pending.done()
        before = recover(server.disk.power_loss())
        assert before is not None and not before.state.buffer.waiting
        server.disk.open.set()
        assert pending.result(40).status == "accepted"
    after = recover(server.disk.power_loss())
    assert after is not None and list(after.state.buffer.waiting) == [orders[0].group_id]
    assert learner.members()[0].worker == "w"


def test_peers_of_a_killed_server_go_on_with_the_next_as_if_nothing_had_been(server: Server) -> None:
    learner, worker = begin(server)
    made = asyncio.run(fill(worker, 3))
    lease = learner.lease(step=0, rank=0, world=1, wait_s=30)
    learner.announce({"epoch": 3})
    server.restart()
    again = learner.lease(step=0, rank=0, world=1, wait_s=30)
    assert again.plan == lease.plan
    for place, trajectory in lease.trajectories.items():
        assert same_trajectory(trajectory, again.trajectories[place])
    assert learner.trained(step=0, policy_version=1).metrics["replay/trained"] == 2
    server.restart()
    assert learner.watch(revision=0, wait_s=1).values == {"epoch": 3}
    worker.rendezvous().served(1, "f")
    made |= asyncio.run(fill(worker, 4, version=1))
    plan = learner.lease(step=1, rank=0, world=1, wait_s=30).plan
    assert {header.group_id for header in plan.groups} <= made.keys()
    assert [member.worker for member in learner.members()] == ["w"]


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> ClockAhead:
    """The clock of the server and of its clients; to be asked for before `server`."""
    clock = ClockAhead()
    for module in (serving, connection):
        monkeypatch.setattr(module, "awake_clock", lambda config: clock)
    return clock


def blocked(call, server: Server) -> threading.Thread:
    """Run `call`; its records are written, never synced, and the server dies with its reply unsent."""
    server.disk.hold()
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert server.disk.waiting.wait(40)
    time.sleep(0.1)
    assert thread.is_alive(), "the reply left before the sync"
    server.restart()
    return thread


def test_an_acquire_whose_reply_was_lost_brings_the_same_orders_again(server: Server) -> None:
    _, worker = begin(server)
    taken: list = []
    thread = blocked(lambda: taken.extend(asyncio.run(worker.acquire(slots=2, wait_s=30)).assignments), server)
    thread.join(40)
    found = recover(server.disk.copy())
    assert found is not None
    assert sorted(order.group_id for order in taken) == sorted(found.state.held) == [0, 1]
    assert {order.attempt for order in taken} == {0}


def test_a_step_whose_count_was_acknowledged_by_nobody_is_counted_once(server: Server) -> None:
    learner, worker = begin(server)
    asyncio.run(fill(worker, 2))
    learner.lease(step=0, rank=0, world=1, wait_s=30)
    replies: list = []
    thread = blocked(lambda: replies.append(learner.trained(step=0, policy_version=1)), server)
    thread.join(40)
    assert replies[0].metrics["replay/trained"] == 2
    learner.commit(step=0)
    assert learner.snapshot()["step"] == 0


def test_a_restore_whose_reply_was_lost_gives_the_same_numbers(server: Server) -> None:
    learner = server.new_learner()
    learner.members()  # Its hello is answered: what waits for the sync below is the restore.
    restored: list = []
    thread = blocked(
        lambda: restored.append(learner.restore(step=None, policy_version=NO_VERSION, snapshot=None)), server
    )
    thread.join(40)
    assert (restored[0].next_step, restored[0].next_version) == (0, 0)


def test_a_restarted_server_refuses_a_learner_of_another_folder_as_the_one_before_did(server: Server) -> None:
    first = {"step": None, "policy_version": NO_VERSION, "snapshot": None}
    mine = server.new_learner()
    mine.restore(**first, run="mine")
    mine.publish(policy_version=0, parent=NO_VERSION)
    server.restart()
    mine.members()
    with pytest.raises(FencedError, match="a learner of another run folder trains here"):
        server.new_learner().restore(**first, run="another")
    mine.publish(policy_version=1, parent=0)


def test_a_group_whose_acknowledgement_was_lost_is_stored_once(server: Server) -> None:
    learner, worker = begin(server)
    orders = asyncio.run(worker.acquire(slots=2, wait_s=30)).assignments
    statuses: list[str] = []
    thread = blocked(lambda: statuses.append(asyncio.run(worker.insert(group(orders[0], [0] * 3))).status), server)
    thread.join(40)
    # "accepted" when the dying server's sync, which its death sets free, was done before its socket was closed.
    assert statuses in (["duplicate"], ["accepted"])
    asyncio.run(worker.insert(group(orders[1], [0] * 3)))
    groups = learner.lease(step=0, rank=0, world=1, wait_s=30).plan.groups
    assert sorted(header.group_id for header in groups) == [0, 1]


def test_a_worker_replaced_before_the_restart_stays_fenced_after_it(server: Server) -> None:
    _, zombie = begin(server)
    asyncio.run(zombie.acquire(slots=1, wait_s=30))
    successor = server.worker("w")
    successor.rendezvous().served(0, "f")
    server.restart()
    (order, *_) = asyncio.run(successor.acquire(slots=2, wait_s=30)).assignments
    with pytest.raises(FencedError):
        asyncio.run(zombie.insert(group(order, [0] * 3)))
    assert asyncio.run(successor.insert(group(order, [0] * 3))).status == "accepted"


@pytest.mark.parametrize("server", [{"heartbeat_timeout_s": SOON_SILENT_S}], indirect=True)
def test_groups_of_a_worker_that_does_not_come_back_go_to_others(server: Server) -> None:
    _, lost = begin(server)
    (order,) = asyncio.run(lost.acquire(slots=1, wait_s=30)).assignments
    lost._connection._closing.set()  # It dies with the server.
    server.restart()
    other = server.worker("other")
    other.rendezvous().served(0, "f")
    taken: list[int] = []

    def given_to_another() -> bool:
        taken.extend(o.group_id for o in asyncio.run(other.acquire(slots=4, wait_s=0.5)).assignments)
        return order.group_id in taken

    until(given_to_another)


def test_uncommitted_steps_are_served_again_bit_by_bit_whatever_the_number_of_ranks(server: Server) -> None:
    learner, worker = begin(server)
    first = []
    for step in range(3):
        asyncio.run(fill(worker, 4, version=step))
        first.append(learner.lease(step=step, rank=0, world=1, wait_s=30))
        learner.trained(step=step, policy_version=step + 1)
        worker.rendezvous().served(step + 1, "f")
        if step == 0:
            learner.commit(step=0)
    learner.close()
    server.restart()
    resumed = server.new_learner()
    restored = resumed.restore(step=0, policy_version=1, snapshot=None)
    assert (restored.next_step, restored.next_version) == (1, 4), "a version was used twice"
    resumed.publish(policy_version=4, parent=1)
    other_rank = server.new_learner(1)
    for step in (1, 2):
        halves = [
            resumed.lease(step=step, rank=0, world=2, wait_s=30),
            other_rank.lease(step=step, rank=1, world=2, wait_s=30),
        ]
        assert halves[0].plan.groups == first[step].plan.groups
        both = {**halves[0].trajectories, **halves[1].trajectories}
        assert both.keys() == first[step].trajectories.keys()
        assert all(same_trajectory(both[place], old) for place, old in first[step].trajectories.items())
        assert max(halves[0].plan.staleness.values()) <= 2
        resumed.trained(step=step, policy_version=4 + step)


def test_a_restarted_server_hands_a_batch_to_the_same_ranks_for_the_updates_that_were_announced(
    server: Server,
) -> None:
    learner, worker = begin(server)
    learner.announce({UPDATES: 2})
    asyncio.run(fill(worker, 4))
    before = learner.lease(step=0, rank=0, world=2, wait_s=30).plan
    assert before.shards == shard_step(before, 2, updates=2) != shard_step(before, 2)
    server.restart()
    assert learner.lease(step=0, rank=0, world=2, wait_s=30).plan == before


def test_an_evaluation_that_a_restarted_server_has_made_again_is_returned_once(server: Server) -> None:
    learner, worker = begin(server)
    scored: list[EvalSummary] = []
    for again in range(2):
        if again == 0:
            job = learner.evaluate(step=0, policy_version=0, eval_set="heldout", rows=2, chunk=2)
        order = asyncio.run(evaluation_order(worker))
        result = EvalResult(job_id=job, chunk=0, attempt=order.attempt, version_min=0, version_max=0, scores=(1.0, 0.0))
        asyncio.run(worker.report_evaluation(result))
        scored += learner.wait_evaluations(wait_s=30)
        server.restart()
    assert [summary.job_id for summary in scored] == [job]


async def evaluation_order(worker: RolloutClient) -> EvalAssignment:
    """Where the server is just being restarted, others may come first: groups are of no matter here."""
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        for order in (await worker.acquire(slots=1, wait_s=1)).evaluations:
            return order
    raise AssertionError("no evaluation was given out")


def test_workers_of_a_resumed_run_wait_for_its_learner_and_old_ones_are_told_to_stop(server: Server) -> None:
    learner, old = begin(server)
    learner.finish()
    server.restart()
    new = server.worker("new")
    assert asyncio.run(old.acquire(slots=1, wait_s=30)).stop
    waiting = asyncio.run(new.acquire(slots=1, wait_s=0.3))
    assert not waiting.stop and not waiting.assignments and "learner" in waiting.waiting_for
    resumed = server.new_learner(5)
    version = resumed.restore(step=None, policy_version=NO_VERSION, snapshot=None).next_version
    resumed.publish(policy_version=version, parent=NO_VERSION)
    new.rendezvous().served(version, "f")
    assert asyncio.run(new.acquire(slots=1, wait_s=30)).assignments


def test_a_full_disk_ends_the_server_and_the_next_has_all_that_was_acknowledged(server: Server) -> None:
    learner, worker = begin(server)
    orders = asyncio.run(worker.acquire(slots=2, wait_s=30)).assignments
    assert asyncio.run(worker.insert(group(orders[0], [0] * 3))).status == "accepted"
    server.disk.fail_with = errno.ENOSPC
    with ThreadPoolExecutor() as pool:
        pending = pool.submit(asyncio.run, worker.insert(group(orders[1], [0] * 3)))
        until(lambda: not server.thread.is_alive())
        assert not pending.done(), "it is not durable"
        server.disk.fail_with = 0
        server.start()
        assert pending.result(40).status == "accepted"
    plan = learner.lease(step=0, rank=0, world=1, wait_s=30).plan
    assert {header.group_id for header in plan.groups} == {order.group_id for order in orders}


@pytest.mark.parametrize("server", [{"wait_timeout_s": 5.0}], indirect=True)
def test_a_learner_does_not_wait_for_ever_for_a_disk_that_does_not_answer(server: Server) -> None:
    learner, _ = begin(server)
    server.disk.open.clear()
    with pytest.raises(NoProgress, match=r"the replay server made nothing durable for 5 s: the disk of the journal"):
        learner.announce({"epoch": 1})
    server.disk.open.set()  # Or nobody's goodbye would be answered.


@pytest.mark.parametrize("server", [{"wait_timeout_s": 5.0}], indirect=True)
def test_who_asks_a_server_that_is_gone_gives_up_at_its_deadline_and_names_it(server: Server) -> None:
    learner, _ = begin(server)
    server.kill()
    with pytest.raises(NoProgress, match=server.config.address):
        learner.snapshot()
    server.start()
