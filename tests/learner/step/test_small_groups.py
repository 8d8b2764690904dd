"""Groups closed without all their members: each member is compared with the siblings that exist."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.balance import shard_step
from asyncrl.learner.batch.micro_batch import pack
from asyncrl.learner.batch.plan import Budget, plan_minibatches
from asyncrl.learner.step.targets import with_targets
from asyncrl.schema import AdvantageConfig
from asyncrl.types import StepPlan
from tests.learner.feed import header_of, make_group, make_lease

CPU = torch.device("cpu")
REWARDS = ([1.0, 0.0, 0.5, 0.25], [1.0, 0.0, 0.0], [0.25, 1.0])


def step(world: int):
    """Groups of four, three and two, with these rewards."""
    rng = np.random.default_rng(5)
    groups = []
    for number, rewards in enumerate(REWARDS):
        made = make_group(rng, number, size=len(rewards), versions=(0,))
        members = [replace(t, reward=r) for t, r in zip(made.trajectories, rewards, strict=True)]
        groups.append(replace(made, trajectories=tuple(members)))
    plan = StepPlan(
        step=0,
        policy_version=0,
        groups=tuple(header_of(group) for group in groups),
        staleness={0: 0},
        max_staleness=0,
        shards=(),
    )
    return replace(plan, shards=shard_step(plan, world)), groups


def expected(config: AdvantageConfig) -> dict[tuple[int, int], float]:
    result = {}
    for group, rewards in enumerate(REWARDS):
        for place, reward in enumerate(rewards):
            others = [r for other, r in enumerate(rewards) if other != place]
            baseline = np.mean(others) if config.baseline == "loo" else np.mean(rewards)
            scale = np.std(rewards, ddof=1) + 1e-6 if config.std == "group" else 1.0
            result[group, place] = (reward - baseline) / scale
    return result


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "config",
    [AdvantageConfig(), AdvantageConfig(baseline="loo"), AdvantageConfig(std="group")],
    ids=lambda config: f"{config.baseline}-{config.std}",
)
def test_advantages_are_those_against_the_siblings_that_are_there(config: AdvantageConfig, world: int) -> None:
    plan, groups = step(world)
    seen = {}
    for rank in range(world):
        lease = make_lease(plan, groups, rank)
        (minibatch,) = plan_minibatches(plan, rank=rank, updates=1, budget=Budget(tokens=10_000, attention=4 * 10_000))
        assert minibatch.denominators.sequences == 9
        assert minibatch.denominators.groups == 3
        batches = [pack(lease, members, CPU) for members in minibatch.micro_batches]
        for batch in with_targets(plan, batches, config, 0.0, CPU)[0]:
            assert batch.advantages is not None
            for place, member in enumerate(batch.members):
                mine = batch.advantages[(batch.sequence_ids == place) & batch.loss_mask]
                seen[member] = mine.numpy()
    wanted = expected(config)
    assert seen.keys() == wanted.keys()
    for member, values in seen.items():
        np.testing.assert_allclose(values, wanted[member], atol=1e-5)
