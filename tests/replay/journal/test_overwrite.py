"""overwrite=true over a journal: whose it is, and whether anybody still needs it."""

from __future__ import annotations

import asyncio
import threading
from concurrent import futures
from dataclasses import replace

import pytest

from asyncrl.errors import JournalError
from asyncrl.replay.journal.durable import recover
from asyncrl.replay.serving import run_server
from tests.replay.helpers import SOON_SILENT_S
from tests.replay.lives import ADMISSION, Server
from tests.replay.peers import begin, fill

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


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
    found = recover(server.disk.copy())
    return found is not None and found.run["run_id"] == run_id and found.state.next_group_id == 0


def test_a_worker_that_is_left_over_keeps_no_journal_from_a_new_run_with_overwrite(server: Server) -> None:
    learner, worker = begin(server)
    asyncio.run(fill(worker, 2))
    learner.close()
    server.kill()
    server.config = replace(server.config, heartbeat_timeout_s=SOON_SILENT_S)  # So long it waits for a learner.
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
        try:
            pool.submit(run_server, server.config, ADMISSION, "other", "d", 7, stop, **kept).result(90)
        finally:
            stop.set()
    assert server.disk.names() == names


def test_a_damaged_journal_that_no_learner_asks_for_is_deleted_by_a_new_run_with_overwrite(server: Server) -> None:
    learner, worker = begin(server)
    asyncio.run(fill(worker, 2))
    learner.close()
    server.kill()
    server.disk.flip(server.disk.names()[0], 40)
    server.config = replace(server.config, heartbeat_timeout_s=SOON_SILENT_S)
    server.start(run_id="other", fresh=True)
    begin(server)
    assert journal_is_of(server, "other")
