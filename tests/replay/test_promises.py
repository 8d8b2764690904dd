"""What the server says it has, it has: nothing is durable before its sync, and no reply leaves before what it rests on.

Fast, and beside the slow tests that kill servers: a mistake here must not wait for them to be found.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from asyncrl.errors import JournalError
from asyncrl.replay.client.connection import Connection
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.state import ReplayState
from asyncrl.replay.journal.log import Journal, JournalSettings
from tests.replay.helpers import group
from tests.replay.lives import Server
from tests.replay.memory_disk import MemoryDisk
from tests.replay.peers import begin
from tests.waiting import until


class Watching(MemoryDisk):
    """Notes what the journal calls durable while a sync goes on; `broken`: the sync fails."""

    def __init__(self) -> None:
        super().__init__()
        self.journal: Journal | None = None
        self.durable: list[int] = []
        self.broken = False

    def sync(self, name: str) -> None:
        if self.journal is not None:
            self.durable.append(self.journal.durable)
        if self.broken:
            raise OSError(errno.EIO, "planned failure")
        super().sync(name)


def test_nothing_is_durable_before_the_sync_that_makes_it_so() -> None:
    disk = Watching()
    journal = Journal(disk, JournalSettings(), {"run_id": "run"}, ReplayState())
    journal.write_batch()
    disk.journal = journal
    for number in range(3):
        before = journal.durable
        journal.append(ev.Joined(f"w{number}", "a"))
        assert journal.durable == before < journal.promised
        disk.durable.clear()
        journal.write_batch()
        assert disk.durable and set(disk.durable) == {before}, "called durable before the sync was done"
        assert journal.durable == journal.promised


def test_what_a_failed_sync_was_for_is_not_durable() -> None:
    disk = Watching()
    journal = Journal(disk, JournalSettings(), {"run_id": "run"}, ReplayState())
    journal.write_batch()
    before = journal.durable
    journal.append(ev.Joined("w", "a"))
    disk.broken = True
    with pytest.raises(JournalError):
        journal.write_batch()
    assert journal.durable == before < journal.promised


@pytest.mark.timeout(400)
def test_no_reply_leaves_before_what_it_rests_on_is_durable() -> None:
    server = Server()
    server.start()
    try:
        learner, worker = begin(server)
        orders: list[Any] = []

        def acquire() -> None:
            orders.extend(asyncio.run(worker.acquire(slots=2, wait_s=30)).assignments)

        calls: list[tuple[Connection, Callable[[], object]]] = [
            (worker._connection, acquire),
            (worker._connection, lambda: asyncio.run(worker.insert(group(orders[0], [0] * 3)))),
            (worker._connection, lambda: asyncio.run(worker.insert(group(orders[1], [0] * 3)))),
            (learner._connection, lambda: learner.lease(step=0, rank=0, world=1, wait_s=30)),
            (learner._connection, lambda: learner.trained(step=0, policy_version=1)),
            (learner._connection, lambda: learner.commit(step=0)),
            (learner._connection, lambda: learner.announce({"epoch": 3})),
        ]
        with ThreadPoolExecutor(1) as pool:
            for connection, call in calls:
                server.disk.hold()
                pending = pool.submit(call)
                assert server.disk.waiting.wait(60), "nothing is written"
                hear_twice(connection)
                assert not pending.done(), "the reply left before the sync"
                server.disk.open.set()
                pending.result(60)
    finally:
        server.disk.open.set()
        server.close()


def hear_twice(connection: Connection) -> None:
    """Two words of the server after now: what was on its way before them is here."""
    for _ in range(2):
        before = connection._contact
        until(lambda before=before: connection._contact > before)
