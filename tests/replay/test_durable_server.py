"""A server with a journal: what it says it has, it has; killed and started again, its peers go on where they were."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures

import pytest

from asyncrl.errors import FencedError, JournalError, NoProgress
from asyncrl.replay.client import LearnerClient, RolloutClient
from asyncrl.replay.config import JournalConfig, ReplayConfig
from asyncrl.replay.durable import recover
from asyncrl.replay.serving import run_server
from asyncrl.types import NO_VERSION, EvalAssignment, EvalResult, EvalSummary

from .cluster import begin, fill
from .helpers import SOON_SILENT_S, group, replay_config, same_trajectory, settings
from .memory_disk import MemoryDisk

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

ADMISSION = settings(groups_per_step=2, pipeline_depth=1)


class SlowDisk(MemoryDisk):
    """Syncs wait until `open` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Event()
        """Something is written and waits for its sync."""
        self.written = 0
        """Times that something was."""
        self._free = -1

    def hold(self) -> None:
        """Syncs of what is written from now on wait; one of what came before would be taken for theirs."""
        self._free = self.written
        self.waiting.clear()
        self.open.clear()

    def write(self, name: str, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        super().write(name, offset, buffers)
        self.written += 1

    def sync(self, name: str) -> None:
        if self.written > self._free:
            if not self.open.is_set():
                self.waiting.set()
            self.open.wait(60)
        super().sync(name)

    def copy(self) -> SlowDisk:
        after = SlowDisk()
        after.__dict__.update({k: v for k, v in super().copy().__dict__.items() if k not in ("open", "waiting")})
        return after


class Server:
    """Killed and started again at one address, each life on what the one before left on the disk."""

    def __init__(self, disk: SlowDisk | None = None, **config) -> None:
        self.config: ReplayConfig = replay_config(journal=JournalConfig(fsync_ms=1.0), **config)
        self.disk = disk or SlowDisk()
        self._clients: list = []

    def start(self, *, run_id: str = "run", fresh: bool = False) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=run_server,
            args=(self.config, ADMISSION, run_id, "d", 7, self._stop),
            kwargs={"disk": self.disk, "fresh": fresh},
            daemon=True,
        )
        self._thread.start()

    def kill(self) -> None:
        """What is written by now is what the next life finds; nothing of this one's gets out any more."""
        left = self.disk.copy()
        self._stop.set()
        self.disk.open.set()
        self._thread.join(40)
        self.disk = left

    def restart(self) -> None:
        self.kill()
        self.start()

    def learner(self, rank: int = 0) -> LearnerClient:
        return self._kept(LearnerClient(self.config.address, rank=rank, run_digest="d", config=self.config))

    def worker(self, name: str = "w") -> RolloutClient:
        return self._kept(RolloutClient(self.config.address, worker=name, run_digest="d", config=self.config))

    def _kept(self, client):
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            closed = client.close()
            if closed is not None:
                asyncio.run(closed)
        self.kill()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(**getattr(request, "param", {}))
    made.start()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("server", [{"heartbeat_timeout_s": SOON_SILENT_S}], indirect=True)
def test_a_reply_leaves_only_after_the_sync_that_covers_it_and_heartbeats_go_on(server: Server) -> None:
    learner, worker = begin(server)
    orders = asyncio.run(worker.acquire(slots=2, wait_s=30)).assignments
    server.disk.open.clear()
    body = asyncio.run_coroutine_threadsafe
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    pending = body(worker.insert(group(orders[0], [0] * 3)), loop)
    time.sleep(2.0)  # Longer than heartbeat_timeout_s: a server that waited for the disk would have been given up.
    assert not pending.done()
    before = recover(server.disk.power_loss(random.Random(0)), ADMISSION.max_staleness)
    assert before is not None and not before.state.buffer.waiting
    server.disk.open.set()
    assert pending.result(40).status == "accepted"
    after = recover(server.disk.power_loss(random.Random(0)), ADMISSION.max_staleness)
    assert after is not None and list(after.state.buffer.waiting) == [orders[0].group_id]
    loop.call_soon_threadsafe(loop.stop)
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
    asyncio.run(worker.served(1, "f"))
    made |= asyncio.run(fill(worker, 4, version=1))
    plan = learner.lease(step=1, rank=0, world=1, wait_s=30).plan
    assert {header.group_id for header in plan.groups} <= made.keys()
    assert [member.worker for member in learner.members()] == ["w"]


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
    found = recover(server.disk.copy(), ADMISSION.max_staleness)
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
    learner = server.learner()
    learner.members()  # Its hello is answered: what waits for the sync below is the restore.
    restored: list = []
    thread = blocked(
        lambda: restored.append(learner.restore(step=None, policy_version=NO_VERSION, snapshot=None)), server
    )
    thread.join(40)
    assert (restored[0].next_step, restored[0].next_version) == (0, 0)


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
    asyncio.run(successor.served(0, "f"))
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
    asyncio.run(other.served(0, "f"))
    deadline, taken = time.monotonic() + 40, []
    while order.group_id not in taken and time.monotonic() < deadline:
        taken += [o.group_id for o in asyncio.run(other.acquire(slots=4, wait_s=0.5)).assignments]
    assert order.group_id in taken


def test_uncommitted_steps_are_served_again_bit_by_bit_whatever_the_number_of_ranks(server: Server) -> None:
    learner, worker = begin(server)
    first = []
    for step in range(3):
        asyncio.run(fill(worker, 4, version=step))
        first.append(learner.lease(step=step, rank=0, world=1, wait_s=30))
        learner.trained(step=step, policy_version=step + 1)
        asyncio.run(worker.served(step + 1, "f"))
        if step == 0:
            learner.commit(step=0)
    learner.close()
    server.restart()
    resumed = server.learner()
    restored = resumed.restore(step=0, policy_version=1, snapshot=None)
    assert (restored.next_step, restored.next_version) == (1, 4), "a version was used twice"
    resumed.publish(policy_version=4, parent=1)
    other_rank = server.learner(1)
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


def test_a_server_that_is_started_again_with_overwrite_keeps_the_journal_of_the_run_whose_learner_is_there(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    learner, worker = begin(server)
    made = asyncio.run(fill(worker, 2))
    server.kill()
    server.start(run_id="other", fresh=True)
    lease = learner.lease(step=0, rank=0, world=1, wait_s=30)
    assert {header.group_id for header in lease.plan.groups} == set(made)
    said = next(record.getMessage() for record in caplog.records if "overwrite=true, but" in record.getMessage())
    assert "learner" in said and learner._connection.incarnation in said and "resume=auto" in said


def journal_is_of(server: Server, run_id: str) -> bool:
    found = recover(server.disk.copy(), ADMISSION.max_staleness)
    return found is not None and found.run["run_id"] == run_id and found.state.next_group_id == 0


@pytest.mark.parametrize("server", [{"heartbeat_timeout_s": SOON_SILENT_S}], indirect=True)
def test_a_worker_that_is_left_over_keeps_no_journal_from_a_new_run_with_overwrite(server: Server) -> None:
    learner, worker = begin(server)
    asyncio.run(fill(worker, 2))
    learner.close()
    server.kill()
    server.start(run_id="other", fresh=True)
    begin(server)
    assert journal_is_of(server, "other")


@pytest.mark.parametrize("server", [{"heartbeat_timeout_s": 1000.0}], indirect=True)
def test_the_journal_of_a_finished_run_is_deleted_at_once_whoever_is_still_there(server: Server) -> None:
    learner, worker = begin(server)
    asyncio.run(fill(worker, 2))
    learner.finish()
    server.kill()
    server.start(run_id="other", fresh=True)
    begin(server)  # Long before the server could have heard nobody.
    assert journal_is_of(server, "other")


def test_a_damaged_journal_is_kept_and_named_while_a_learner_of_some_run_is_there(server: Server) -> None:
    _, worker = begin(server)
    asyncio.run(fill(worker, 2))
    server.kill()
    names = server.disk.names()
    server.disk.flip(names[0], 40)
    stop, kept = threading.Event(), {"disk": server.disk, "fresh": True}
    with futures.ThreadPoolExecutor() as pool, pytest.raises(JournalError, match=r"damaged at byte 0"):
        pool.submit(run_server, server.config, ADMISSION, "other", "d", 7, stop, **kept).result(90)
    assert server.disk.names() == names


@pytest.mark.parametrize("server", [{"heartbeat_timeout_s": SOON_SILENT_S}], indirect=True)
def test_a_damaged_journal_that_no_learner_asks_for_is_deleted_by_a_new_run_with_overwrite(server: Server) -> None:
    learner, worker = begin(server)
    asyncio.run(fill(worker, 2))
    learner.close()
    server.kill()
    server.disk.flip(server.disk.names()[0], 40)
    server.start(run_id="other", fresh=True)
    begin(server)
    assert journal_is_of(server, "other")


def test_an_evaluation_that_a_restarted_server_has_made_again_is_returned_once(server: Server) -> None:
    learner, worker = begin(server)
    scored: list[EvalSummary] = []
    for again in range(2):
        if again == 0:
            job = learner.evaluate(step=0, policy_version=0, eval_set="heldout", rows=2, chunk=2)
        order = asyncio.run(evaluation_order(worker))
        result = EvalResult(job_id=job, chunk=0, attempt=order.attempt, policy_version=0, scores=(1.0, 0.0))
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
    resumed = server.learner(5)
    version = resumed.restore(step=None, policy_version=NO_VERSION, snapshot=None).next_version
    resumed.publish(policy_version=version, parent=NO_VERSION)
    asyncio.run(new.served(version, "f"))
    assert asyncio.run(new.acquire(slots=1, wait_s=30)).assignments


def test_a_full_disk_pauses_admission_with_the_reason_and_the_run_goes_on_when_there_is_space(server: Server) -> None:
    learner, worker = begin(server)
    orders = asyncio.run(worker.acquire(slots=1, wait_s=30)).assignments
    server.disk.fail_with = errno.ENOSPC
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    pending = asyncio.run_coroutine_threadsafe(worker.insert(group(orders[0], [0] * 3)), loop)
    with pytest.raises(NoProgress, match="the disk is full"):
        learner.lease(step=0, rank=0, world=1, wait_s=1.5)
    assert not pending.done()
    server.disk.fail_with = 0
    assert pending.result(40).status == "accepted"
    with contextlib.suppress(NoProgress):
        asyncio.run(fill(worker, 3))
    assert learner.lease(step=0, rank=0, world=1, wait_s=30).plan.step == 0
    loop.call_soon_threadsafe(loop.stop)


def test_a_learner_does_not_wait_for_ever_for_a_disk_that_does_not_answer() -> None:
    server = Server(wait_timeout_s=1.0)
    server.start()
    learner, _ = begin(server)
    server.disk.open.clear()
    with pytest.raises(
        NoProgress, match=r"nothing became durable at the replay server for 1 s: the disk of the journal"
    ):
        learner.announce({"epoch": 1})
    server.close()


def test_a_worker_without_a_server_gives_up_at_its_deadline_and_names_it() -> None:
    server = Server(wait_timeout_s=2.5)
    server.start()
    learner, _ = begin(server)
    server.kill()
    with pytest.raises(NoProgress, match=server.config.address):
        learner.snapshot()
    server.start()
    server.close()
