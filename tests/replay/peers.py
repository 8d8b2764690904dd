"""What most tests of a server do first: a learner that publishes, and a worker that fills a batch."""

from __future__ import annotations

from asyncrl.replay.client.client import LearnerClient, RolloutClient
from asyncrl.types import NO_VERSION, TrajectoryGroup
from tests.replay.helpers import group
from tests.replay.served import Clients


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
