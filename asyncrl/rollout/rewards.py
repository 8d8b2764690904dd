"""Where a worker's rewards come from: processes of its own, or the service that all workers share."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.score import Outcome
from asyncrl.rollout.host import late_import
from asyncrl.schema import Config


class Rewards(Protocol):
    async def score(self, completions: list[str], row: dict[str, Any]) -> list[Outcome]:
        """One score per completion of one group, or why this one has none. Raises RewardError when none has one."""
        ...

    def stats(self) -> dict[str, float]: ...


def make_rewards(config: Config) -> AbstractAsyncContextManager[Rewards]:
    """Ready once entered; raises ConfigError then if the reward cannot be loaded."""
    if config.reward.host == "ray":
        return late_import("reward_service").SharedRewards(wait_s=config.replay.wait_timeout_s / 2)
    return RewardPool(
        config.reward.function,
        workers=config.reward.workers,
        timeout_s=config.reward.timeout_s,
        model=config.reward.model,
    )
