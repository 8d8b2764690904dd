"""A planner and its shards as real servers in threads, with real clients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from asyncrl.replay.client.client import LearnerClient, RolloutClient
from asyncrl.replay.journal.log import JournalSettings
from asyncrl.replay.serving import run_server
from asyncrl.replay.shards.running import run_shard
from asyncrl.replay.shards.store import open_store
from asyncrl.settings.replay import JournalConfig
from asyncrl.types import NO_VERSION, TrajectoryGroup
from tests.addresses import free_address
from tests.replay.helpers import group, replay_config, settings
from tests.replay.lives import Life
from tests.replay.memory_disk import MemoryDisk
from tests.replay.served import Clients

ADMISSION = settings(groups_per_step=4, pipeline_depth=1)


class Cluster(Clients):
    """A planner, its shards, and their clients."""

    def __init__(self, shards: int = 2, **changes) -> None:
        journal = JournalConfig(fsync_ms=1.0, segment_mb=1)
        super().__init__(replay_config(shards=shards, journal=journal, **changes))
        self.planner = Life(self._plan)
        self.shards = [Life(self._shard(number)) for number in range(shards)]

    def _plan(self, disk: MemoryDisk, stop: threading.Event) -> None:
        run_server(self.config, ADMISSION, "run", "d", 7, stop, disk=disk)

    def _shard(
        self, number: int, fresh: bool = False, address: str = ""
    ) -> Callable[[MemoryDisk, threading.Event], None]:
        own = replace(self.config, shard_address=address or free_address())
        return lambda disk, stop: run_shard(own, number, "d", disk=disk, stop=stop, fresh=fresh)

    def start(self) -> None:
        for life in (self.planner, *self.shards):
            life.start()

    def held(self) -> list[set[int]]:
        """Return the group ids that each shard would find if it were killed now."""
        run = [{"run_id": "run", "shard": number} for number in range(len(self.shards))]
        return [
            {key.group_id for key in open_store(life.disk.copy(), JournalSettings(), one).held}
            for life, one in zip(self.shards, run, strict=True)
        ]

    def close(self) -> None:
        super().close()
        for life in (*self.shards, self.planner):
            life.end()


def begin(peers: Clients) -> tuple[LearnerClient, RolloutClient]:
    learner, worker = peers.new_learner(), peers.worker()
    version = learner.restore(step=None, policy_version=NO_VERSION, snapshot=None).next_version
    learner.publish(policy_version=version, parent=NO_VERSION)
    worker.rendezvous().served(version, "f")
    return learner, worker


async def fill(worker: RolloutClient, slots: int, tokens: int = 3, version: int = 0) -> dict[int, TrajectoryGroup]:
    made = {}
    for order in (await worker.acquire(slots=slots, wait_s=60)).assignments:
        made[order.group_id] = group(order, [version] * tokens)
        # "duplicate" if the acknowledgement was lost or late and the client has sent the group again.
        assert (await worker.insert(made[order.group_id])).status in ("accepted", "duplicate")
    return made
