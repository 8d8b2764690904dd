"""Creates the source of a worker's rewards: processes of its own, or the service that all workers share."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from asyncrl.checks.rewards import at_once, reward_terms
from asyncrl.collector import load
from asyncrl.environments.base import Score
from asyncrl.errors import RewardError
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.score import Outcome
from asyncrl.schema import Config


class Rewards(Protocol):
    @property
    def score(self) -> Score: ...

    def stats(self) -> dict[str, float]: ...


class NoRewards(AbstractAsyncContextManager["NoRewards"]):
    """For an environment that computes its own rewards."""

    async def __aexit__(self, *_: object) -> None: ...

    async def score(self, completions: list[str], row: dict[str, Any], **_: Any) -> list[Outcome]:
        raise RewardError(
            f"the environment asked for the scores of {len(completions)} completions, but reward.function is not set. "
            "Set it, or score in the environment"
        )

    def stats(self) -> dict[str, float]:
        return {}


def make_rewards(config: Config, *, of_set: str = "") -> AbstractAsyncContextManager[Rewards]:
    """Ready once entered, which raises ConfigError if the reward cannot be loaded.

    Args:
        of_set: the evaluation set that these settings belong to, if they differ from those of training.
    """
    terms = reward_terms(config.reward)
    if not terms:
        return NoRewards()
    if config.reward.host == "ray":
        return load("asyncrl.rollout.rewards.service").SharedRewards(of_set, wait_s=config.replay.wait_timeout_s / 2)
    return RewardPool(
        terms,
        workers=config.reward.workers,
        timeout_s=config.reward.timeout_s,
        at_once=at_once(config.reward),
    )
