"""The reward service on a real local Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import ray

from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.score import Outcome, RewardScore
from asyncrl.rollout.pool.ray_host import RayHost
from asyncrl.rollout.rewards.service import SharedRewards
from asyncrl.schema import RewardConfig

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(400)]

FILE = str(Path(__file__).parents[2] / "rewards" / "reward_functions.py")


@pytest.fixture
def host() -> Iterator[RayHost]:
    host = RayHost(address="", workers=1, gpus_per_worker=lambda _: 0.0)
    yield host
    host.close()


def row(do: str) -> dict:
    return {"prompt": "p", "do": do}


def parts(outcome: Outcome) -> dict[str, float]:
    assert isinstance(outcome, RewardScore)
    return outcome.parts


def test_the_service_scores_fails_and_comes_back_like_processes_of_ones_own(host: RayHost) -> None:
    reward = RewardConfig(function=f"{FILE}:by_command", timeout_s=12.0, host="ray")  # of the good calls too
    host.serve_rewards(asdict(reward), {"OMP_NUM_THREADS": "1"})

    async def scenario() -> None:
        async with SharedRewards(wait_s=150) as one, SharedRewards(wait_s=150) as other:
            first, second = await asyncio.gather(one.score(["ab"], row("fine")), other.score(["abc"], row("fine")))
            assert (parts(first[0]), parts(second[0])) == ({"letters": 2.0}, {"letters": 3.0})
            with pytest.raises(RewardError, match="no such thing"):
                await one.score(["a"], row("raise"))
            with pytest.raises(RewardError, match=r"longer than reward.timeout_s=12 s"):
                await one.score(["a"], row("hang"))
            assert one.stats() == {"reward_calls": 3.0, "reward_failures": 2.0}
            ray.kill(host._services[0], no_restart=False)
            (after,) = await other.score(["abcd"], row("fine"))
            assert parts(after) == {"letters": 4.0}
        impatient = SharedRewards(wait_s=0.2)
        async with impatient:
            with pytest.raises(RewardError, match=r"no answer in 0 s; raise reward.workers"):
                await impatient.score(["a"], row("hang"))

    asyncio.run(asyncio.wait_for(scenario(), 300))


def test_a_reward_that_cannot_be_loaded_is_refused_at_the_worker(host: RayHost) -> None:
    host.serve_rewards(asdict(RewardConfig(function=f"{FILE}:nothing", host="ray")), dict(os.environ))

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="has no 'nothing'"):
            await SharedRewards(wait_s=60).__aenter__()

    asyncio.run(asyncio.wait_for(scenario(), 120))
