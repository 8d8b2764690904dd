"""A rollout worker that can be verified: it has no engine, and the content of a group follows from its id. A nonce
marks each group."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time

import numpy as np

from asyncrl.errors import AsyncRLError
from asyncrl.replay.client.client import RolloutClient
from asyncrl.replay.protocol import Acquired
from asyncrl.types import NO_VERSION, Assignment, Trajectory, TrajectoryGroup

from .settings import DIGEST, ChaosSettings, History

OUTCOMES = {"accepted": "ok", "duplicate": "ok", "closed": "info"}
"""Status of the reply -> outcome of the insert. Any other status means that it was refused."""
PROMPT = 3
COMPLETION = 4


def trajectory(nonce: int, member: int, group_id: int, versions: list[int]) -> Trajectory:
    """Return a trajectory whose prompt holds nonce, member and group id, and whose completion is derived from the
    group id and member."""
    tokens = [nonce, member, group_id, *((group_id * 31 + member * 7 + i) % 1000 for i in range(COMPLETION))]
    mask = np.arange(len(tokens)) >= PROMPT
    sampled = np.full(len(tokens), NO_VERSION, np.int32)
    sampled[mask] = sorted(versions)
    return Trajectory(
        token_ids=np.array(tokens, np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        policy_versions=sampled,
        reward=float(member),
        extras={"nonce": np.full((member + 1, 2), nonce)},
    )


class ChaosWorker:
    def __init__(self, settings: ChaosSettings, name: str) -> None:
        self.settings, self.name = settings, name
        self.history = History(settings.root / "history" / f"{name}-{os.getpid()}.jsonl")
        self.client = RolloutClient(settings.address, worker=name, run_digest=DIGEST, config=settings.replay())
        self.served = NO_VERSION
        self.waiting_for = ""
        self.random = random.Random(os.getpid())

    async def run(self) -> None:
        follow = asyncio.create_task(self.follow())
        tasks: set[asyncio.Task] = {follow}
        try:
            while True:
                acquired: Acquired = await self.client.acquire(slots=4, wait_s=0.5)
                if acquired.stop:
                    break
                self.note_wait(acquired.waiting_for)
                for assignment in acquired.assignments:
                    self.history.note("taken", group=assignment.group_id, attempt=assignment.attempt)
                    tasks.add(asyncio.create_task(self.make(assignment)))
                for done in [task for task in tasks if task.done()]:
                    tasks.discard(done)
                    done.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.client.close()

    def note_wait(self, waiting_for: str) -> None:
        if waiting_for != self.waiting_for:
            self.waiting_for = waiting_for
            self.history.note("waits", waiting_for=waiting_for)

    async def follow(self) -> None:
        """Serve each policy version that the board announces."""
        revision = -1
        while True:
            board = await asyncio.to_thread(self.client.rendezvous().watch, revision, 1.0)
            revision = board.revision
            version = board.values.get("version", NO_VERSION)
            if version > self.served:
                await asyncio.to_thread(self.client.rendezvous().served, version, "f")
                self.served = version

    async def make(self, assignment: Assignment) -> None:
        started = self.served
        await asyncio.sleep(self.random.choice((0.0, 0.0, 0.002, self.settings.slowest_s)))
        nonce = self.random.getrandbits(31)
        versions = [self.random.choice((started, self.served)) for _ in range(COMPLETION)]
        group = TrajectoryGroup(
            group_id=assignment.group_id,
            prompt_index=assignment.prompt_index,
            attempt=assignment.attempt,
            worker=self.name,
            trajectories=tuple(
                trajectory(nonce, member, assignment.group_id, versions) for member in range(self.settings.group_size)
            ),
            started_at=time.time(),
        )
        for _ in range(2 if self.random.random() < self.settings.repeats else 1):
            what = {"group": assignment.group_id, "attempt": assignment.attempt, "nonce": nonce}
            self.history.note("invoke", **what)
            try:
                reply = await self.client.insert(group)
            except AsyncRLError as error:
                self.history.note("info", error=str(error), **what)
                raise
            self.history.note(OUTCOMES.get(reply.status, "fail"), status=reply.status, **what)


if __name__ == "__main__":
    try:
        asyncio.run(ChaosWorker(ChaosSettings.load(sys.argv[1]), sys.argv[2]).run())
    except AsyncRLError as error:
        print(f"{sys.argv[2]}: {type(error).__name__}: {error}", flush=True)
        sys.exit(1)
