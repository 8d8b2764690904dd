"""Advantages of whole sequences, [N]: the reward relative to the rewards of its group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from asyncrl.errors import ConfigError, RewardError

BASELINES = ("mean", "loo", "opo", "none")
STDS = ("none", "group", "batch")


@torch.no_grad()
def group_advantages(
    rewards: Float[Tensor, " N"],
    group_ids: Int[Tensor, " N"],
    baseline: str = "mean",
    std: str = "none",
    lengths: Tensor | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, " N"]:
    """Reward minus the group's baseline, optionally divided by a standard deviation; 0 for a sample without siblings.

    With `baseline=none` a sample needs no siblings and keeps its reward, unless `std=group`.

    Args:
        rewards: [N] one per sequence.
        group_ids: [N] the prompt of each sequence; siblings need not be adjacent.
        baseline: `mean` of the group (GRPO), `loo` mean of the others (RLOO), `opo` mean weighted by length, or `none`.
        std: divide by (standard deviation + eps) of the rewards of the `group` (GRPO) or of the whole `batch`, with
            ddof 1; `none` (Dr. GRPO) does not divide.
        lengths: [N] loss tokens of each sequence; only for `opo`.
        eps: added to the standard deviation, outside the square root.

    Raises:
        ConfigError: unknown `baseline` or `std`, or `opo` without `lengths`.
    """
    if baseline not in BASELINES:
        raise ConfigError(f"advantage.baseline must be one of {', '.join(BASELINES)}; got {baseline!r}")
    if std not in STDS:
        raise ConfigError(f"advantage.std must be one of {', '.join(STDS)}; got {std!r}")
    groups = Groups(group_ids, rewards)
    size = groups.size
    mean = groups.sum(rewards) / size
    if baseline == "mean":
        advantages = rewards - mean
    elif baseline == "loo":
        advantages = (rewards - mean) * size / (size - 1).clamp(min=1)
    elif baseline == "opo":
        if lengths is None:
            raise ConfigError("advantage.baseline=opo weighs rewards by length; pass lengths, or use mean")
        weight = lengths.to(rewards.dtype)
        advantages = rewards - groups.sum(weight * rewards) / groups.sum(weight).clamp(min=1)
    else:
        advantages = rewards.clone()
    if std == "group":
        variance = groups.sum((rewards - mean).square()) / (size - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + eps)
    elif std == "batch" and len(rewards) > 1:
        advantages = advantages / (rewards.std(correction=1) + eps)
    counts = (size > 1) | (baseline == "none" and std != "group")
    return torch.where(counts, advantages, torch.zeros_like(advantages))


class Groups:
    """Sums over siblings, returned for each of them."""

    def __init__(self, group_ids: Int[Tensor, " N"], like: Float[Tensor, " N"]) -> None:
        unique, self.index = torch.unique(group_ids, return_inverse=True)
        self.count = len(unique)
        self.size = self.sum(torch.ones_like(like))

    def sum(self, values: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        return values.new_zeros(self.count).index_add(0, self.index, values)[self.index]


@torch.no_grad()
def gdpo(
    rewards: Float[Tensor, "N K"],
    group_ids: Int[Tensor, " N"],
    weights: Float[Tensor, " K"] | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, " N"]:
    """GDPO (2601.05242): z-score each reward component within its group, sum with `weights`, whiten over the batch."""
    columns = [group_advantages(column, group_ids, "mean", "group", eps=eps) for column in rewards.unbind(1)]
    stacked = torch.stack(columns, 1)
    total = stacked.sum(1) if weights is None else stacked @ weights.to(stacked.dtype)
    if len(total) < 2:
        return torch.zeros_like(total)
    return (total - total.mean()) / (total.std(correction=1) + eps)


def reward_components(rewards: Sequence[Mapping[str, float]], names: Sequence[str] = ()) -> Float[Tensor, "N K"]:
    """The named components of each trajectory's reward as columns, for `gdpo`; by default all names of the first one.

    Raises:
        RewardError: a trajectory lacks a component. It must not count as 0, which would change its siblings' baseline.
    """
    columns = list(names) or sorted(rewards[0]) if rewards else list(names)
    for index, parts in enumerate(rewards):
        if lacking := [name for name in columns if name not in parts]:
            raise RewardError(
                f"trajectory {index} has no reward component {', '.join(lacking)} (it has: {', '.join(parts)}); "
                "return every component from the reward function each time"
            )
    return torch.tensor([[parts[name] for name in columns] for parts in rewards], dtype=torch.float32).reshape(
        len(rewards), len(columns)
    )
