"""Starts of a shard: on its own journal, on that of another run, beside another shard, on a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from dataclasses import replace

import pytest

from asyncrl.errors import FencedError
from asyncrl.replay.codec.group import encode_group, split_frames
from asyncrl.replay.journal.log import JournalSettings
from asyncrl.replay.shards.host import PlannerLink
from asyncrl.replay.shards.receipts import Seals
from asyncrl.replay.shards.store import open_store
from asyncrl.types import Assignment
from benchmarks.parts.keys import some_keys
from tests.addresses import free_address
from tests.replay.cluster import Cluster, begin, fill
from tests.replay.helpers import group
from tests.replay.lives import Life
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LEFT = Assignment(group_id=4, prompt_index=4, attempt=0, seed=0, policy_version=0)


def test_a_shard_started_again_with_overwrite_keeps_what_its_run_has_acknowledged(cluster: Cluster) -> None:
    learner, worker = begin(cluster)
    made = asyncio.run(fill(worker, 4))
    shard = cluster.shards[0]
    shard.kill()
    assert worker._shards is not None
    shard._target = cluster._shard(0, fresh=True, address=worker._shards._links[0].address)
    shard.start()
    lease = learner.lease(step=0, rank=0, world=1, wait_s=60)
    assert {header.group_id for header in lease.plan.groups} == set(made)
    assert len(lease.trajectories) == 8


def test_a_shard_started_with_overwrite_throws_away_what_another_run_has_left() -> None:
    cluster = Cluster(shards=1)
    left = open_store(cluster.shards[0].disk, JournalSettings(), {"run_id": "other", "shard": 0})
    encoded = encode_group(group(LEFT, [0] * 3))
    left.put(encoded.header, split_frames(encoded.header, encoded.frames))
    left.write_batch()
    cluster.shards[0]._target = cluster._shard(0, fresh=True)
    cluster.start()
    with contextlib.closing(cluster):
        _, worker = begin(cluster)
        made = asyncio.run(fill(worker, 1))
        assert cluster.held() == [set(made)]


def test_a_second_shard_of_a_number_is_refused_while_the_first_is_there_and_takes_its_place_when_it_is_not() -> None:
    cluster = Cluster(shards=1, heartbeat_timeout_s=4.0)
    cluster.start()
    with contextlib.closing(cluster):
        _, worker = begin(cluster)
        asyncio.run(fill(worker, 1))
        assert worker._shards is not None
        address = worker._shards._links[0].address
        there = free_address()
        rival = PlannerLink(replace(cluster.config, shard_address=there), 0, "d", Seals(some_keys(), "d"))
        try:
            with pytest.raises(FencedError, match=f"listens on {address}"):
                rival.ask([], "").result(30)
        finally:
            rival.close()
        first, second = cluster.shards[0], Life(cluster._shard(0, address=there))
        first.end()
        second.disk = first.disk
        cluster.shards[0] = second
        second.start()  # it asks until the first was silent for long enough
        question = worker._connection
        until(lambda: question.request("shards", 20.0).result().body == [there])
        worker._shards._ask_anew()  # as after a put without an answer
        asyncio.run(fill(worker, 1))
        assert worker._shards._links[0].address == there


def test_the_full_disk_of_a_shard_pauses_admission_with_the_reason_and_the_run_goes_on_when_there_is_space(
    cluster: Cluster,
) -> None:
    _, worker = begin(cluster)
    asyncio.run(fill(worker, 2))
    (order,) = asyncio.run(worker.acquire(slots=1, wait_s=60)).assignments
    disk = cluster.shards[order.group_id % 2].disk
    disk.fail_with = errno.ENOSPC
    replies: list[str] = []
    late = threading.Thread(
        target=lambda: replies.append(asyncio.run(worker.insert(group(order, [0] * 3))).status), daemon=True
    )
    late.start()

    def why() -> str:
        return asyncio.run(worker.acquire(slots=0, wait_s=0)).waiting_for

    until(lambda: why().startswith(f"shard {order.group_id % 2}: the disk is full"))
    assert not replies
    disk.fail_with = 0
    late.join(60)
    assert replies == ["accepted"]
    until(lambda: "disk" not in why())
    assert asyncio.run(worker.acquire(slots=1, wait_s=60)).assignments
