"""Payloads in shards: a planner and its shards as real servers in threads, with real clients."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import NoProgress, ReplayError, WireError
from asyncrl.replay.client.connection import Connection
from asyncrl.replay.client.shard_links import ShardLinks
from asyncrl.replay.codec import headers
from asyncrl.replay.codec.group import EncodedGroup, encode_group
from asyncrl.replay.journal.log import JournalSettings
from asyncrl.replay.net.keyring import make_keys
from asyncrl.replay.shards.store import open_store
from asyncrl.types import Assignment
from tests.replay.cluster import Cluster, begin, fill
from tests.replay.helpers import group, same_trajectory
from tests.replay.memory_disk import MemoryDisk
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SHARD_0 = {"run_id": "run", "shard": 0}


def test_each_rank_gets_its_part_from_the_shards_and_the_planner_has_no_payload(cluster: Cluster) -> None:
    learner, worker = begin(cluster)
    made = asyncio.run(fill(worker, 4, tokens=20_000))
    assert cluster.held() == [{0, 2}, {1, 3}]
    disk = cluster.planner.disk
    written = b"".join(disk.read(name, 0, disk.size(name)) for name in disk.names())
    assert made[0].trajectories[0].token_ids[100:200].tobytes() not in written
    leases = [
        rank_client.lease(step=0, rank=rank, world=2, wait_s=60)
        for rank, rank_client in enumerate((learner, cluster.new_learner(1)))
    ]
    found = {place: trajectory for lease in leases for place, trajectory in lease.trajectories.items()}
    assert len(found) == 8
    for (position, member), trajectory in found.items():
        sent = made[leases[0].plan.groups[position].group_id].trajectories[member]
        assert same_trajectory(sent, trajectory)
    assert [sample.prompt_text for sample in leases[0].samples] == ["what?"] * 4
    assert not leases[1].samples


def test_what_is_committed_is_forgotten_by_its_shard(cluster: Cluster) -> None:
    learner, worker = begin(cluster)
    asyncio.run(fill(worker, 8))
    learner.lease(step=0, rank=0, world=1, wait_s=60)
    learner.trained(step=0, policy_version=1)
    assert sum(map(len, cluster.held())) == 8  # trained, and not yet in a checkpoint: a rollback would need it
    learner.commit(step=0)
    until(lambda: cluster.held() == [{4, 6}, {5, 7}])


async def put(links: ShardLinks, encoded: EncodedGroup) -> list[Any]:
    return await links.put_at(await links.link_for(encoded), encoded)


def test_a_payload_whose_group_nobody_announced_is_kept_only_as_long_as_it_could_be(cluster: Cluster) -> None:
    _, worker = begin(cluster)
    (order,) = asyncio.run(worker.acquire(slots=1, wait_s=60)).assignments
    links = worker._shards
    assert links is not None
    asyncio.run(put(links, encode_group(group(order, [0] * 3))))
    asyncio.run(put(links, encode_group(group(replace(order, group_id=1), [0] * 3))))  # never ordered
    until(lambda: cluster.held() == [{0}, set()])
    asyncio.run(worker.insert(group(order, [0] * 4)))  # the attempt is closed with another payload
    until(lambda: len(open_store(cluster.shards[0].disk.copy(), JournalSettings(), SHARD_0).held) == 1)


def test_a_shard_that_dies_has_everything_it_acknowledged_and_who_waits_for_it_goes_on(cluster: Cluster) -> None:
    learner, worker = begin(cluster)
    made = asyncio.run(fill(worker, 4))
    dice = random.Random(0)
    for loss in ("kill", "power"):
        shard = cluster.shards[1]
        shard.kill()
        if loss == "power":
            shard.disk = shard.disk.power_loss(dice)
        late = threading.Timer(1.0, shard.start)
        late.start()
        try:
            lease = learner.lease(step=0, rank=0, world=1, wait_s=60)
        finally:
            late.join()
        sent = [made[header.group_id].trajectories for header in lease.plan.groups]
        assert all(same_trajectory(sent[g][t], trajectory) for (g, t), trajectory in lease.trajectories.items())


def test_a_planner_that_dies_finds_its_shards_again(cluster: Cluster) -> None:
    learner, worker = begin(cluster)
    asyncio.run(fill(worker, 4))
    cluster.planner.kill()
    cluster.planner.start()
    assert len(learner.lease(step=0, rank=0, world=1, wait_s=60).trajectories) == 8
    fresh = cluster.new_learner(1)
    assert fresh.lease(step=0, rank=0, world=1, wait_s=60).plan.step == 0


def test_whoever_waits_for_a_shard_that_is_not_there_is_told_which() -> None:
    cluster = Cluster()
    cluster.config = replace(cluster.config, wait_timeout_s=4.0)
    cluster.planner.start()
    cluster.shards[0].start()
    try:
        _, worker = begin(cluster)
        with pytest.raises(NoProgress, match="shard 1 of 2 has not connected"):
            asyncio.run(fill(worker, 1))
        cluster.shards[1].start()

        def came() -> bool:  # a busy machine may take longer to start it than anybody waits here
            with contextlib.suppress(NoProgress):
                return len(worker._connection.request("shards", 20.0).result(60).body) == 2
            return False

        until(came)
        made = asyncio.run(fill(worker, 4))
        assert len(made) >= 1
        cluster.shards[1].kill()
        with pytest.raises(NoProgress, match="shard 1 of the replay"):
            asyncio.run(fill(worker, 4))
        cluster.shards[1].start()
    finally:
        cluster.close()


def test_the_run_ends_for_the_shards_too(cluster: Cluster) -> None:
    learner, worker = begin(cluster)
    asyncio.run(fill(worker, 4))
    learner.finish()
    learner.close()
    asyncio.run(worker.close())
    for life in (*cluster.shards, cluster.planner):
        life.thread.join(60)
        assert not life.thread.is_alive()


def test_a_header_without_its_shards_word_is_refused_and_the_order_given_to_others(cluster: Cluster) -> None:
    _, worker = begin(cluster)
    (order,) = asyncio.run(worker.acquire(slots=1, wait_s=60)).assignments
    encoded = encode_group(group(order, [0] * 3))
    assert worker._shards is not None
    receipt = asyncio.run(put(worker._shards, encoded))
    changed = encode_group(group(order, [0] * 4))
    forged = [receipt[0], receipt[1], "0" * 32]
    for header, rest in ((encoded.header, None), (encoded.header, forged), (changed.header, receipt)):
        body = [headers.encode_group_header(header), rest, None]
        with pytest.raises(WireError, match="receipt"):
            worker._connection.request("insert", body).result(30)
    again = asyncio.run(worker.acquire(slots=8, wait_s=60)).assignments
    assert order.group_id not in {other.group_id for other in again}  # dropped as rejected: its maker is broken


def test_a_payload_that_no_learner_could_use_is_refused_at_the_shard(cluster: Cluster) -> None:
    learner, worker = begin(cluster)
    learner.announce({"vocabulary": 5})
    links = worker._shards
    assert links is not None
    (order,) = asyncio.run(worker.acquire(slots=1, wait_s=60)).assignments

    def refused() -> bool:  # the shard hears of the vocabulary with its next answer
        try:
            asyncio.run(put(links, encode_group(group(order, [0] * 3))))
        except WireError as error:
            assert "vocabulary" in str(error)
            return True
        return False

    until(refused)
    with pytest.raises(WireError, match="vocabulary"):
        asyncio.run(worker.insert(group(order, [0] * 3)))
    waiting = {other.group_id for other in asyncio.run(worker.acquire(slots=8, wait_s=60)).assignments}
    assert waiting and order.group_id not in waiting  # the planner has heard of it
    wrong = Assignment(group_id=2, prompt_index=2, attempt=0, seed=0, policy_version=0)
    encoded = encode_group(group(wrong, [0] * 3))
    link = links._links.get(1) or links._link(1, links._addresses().result())
    with pytest.raises(WireError, match="does not belong to shard 1"):
        body = headers.encode_group_header(encoded.header)
        link.request("put", body, encoded.frames, encoded.header.nbytes).result(30)


def test_a_payload_that_a_shard_has_lost_is_named_with_the_way_out(cluster: Cluster) -> None:
    learner, worker = begin(cluster)
    asyncio.run(fill(worker, 4))
    cluster.shards[0].end()
    cluster.shards[0].disk = MemoryDisk()
    cluster.shards[0].start()
    with pytest.raises(ReplayError, match="shard 0 does not have the payload of group 0"):
        learner.lease(step=0, rank=0, world=1, wait_s=60)


def test_a_worker_cannot_speak_as_a_shard(cluster: Cluster) -> None:
    _, worker = begin(cluster)
    with pytest.raises(WireError, match="no verb"):
        worker._connection.request("collect", [0, "tcp://127.0.0.1:1", "x", "", []]).result(30)
    with pytest.raises(WireError, match="no verb"):
        worker._connection.request("lease", [0, 0, 1, 0.0, 0]).result(30)
    address = cluster.config.address
    impostor = Connection(address, role="shard", name="x", run_digest="d", config=cluster.config)
    try:
        with pytest.raises(WireError, match="other keys"):  # the seal is none
            impostor.request("collect", [0, "tcp://127.0.0.1:1", "x", "", []]).result(30)
        with pytest.raises(WireError, match="no verb"):
            impostor.request("finish").result(30)
    finally:
        impostor.close()


def test_shards_do_the_same_behind_keys(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.start()
    with contextlib.closing(cluster):
        learner, worker = begin(cluster)
        made = asyncio.run(fill(worker, 4))
        lease = learner.lease(step=0, rank=0, world=1, wait_s=60)
        for (position, member), trajectory in lease.trajectories.items():
            sent = made[lease.plan.groups[position].group_id].trajectories[member]
            assert same_trajectory(sent, trajectory)
        assert worker._shards is not None
        address = worker._shards._links[0].address
        make_keys(tmp_path / "keys")
        shutil.copy(Path(cluster.config.keys) / "shard.key", tmp_path / "keys")
        config = replace(cluster.config, keys=str(tmp_path / "keys"))
        stranger = Connection(address, role="worker", name="x", run_digest="d", config=config, server_role="shard")
        try:
            with pytest.raises(ReplayError, match="refused the worker's key"):
                stranger.request("put", [None, None]).result(60)
        finally:
            stranger.close()
