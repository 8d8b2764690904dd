"""Advantages of turns, [N, K]: the return from a turn on, relative to turns of its siblings."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from asyncrl.advantages.group import group_advantages
from asyncrl.advantages.returns import returns_to_go


@torch.no_grad()
def turn_advantages(
    rewards: Float[Tensor, "N K"],
    mask: Tensor,
    group_ids: Int[Tensor, " N"],
    gamma: float = 1.0,
    baseline: str = "mean",
    std: str = "none",
    same_number: bool = False,
    eps: float = 1e-6,
) -> Float[Tensor, "N K"]:
    """Each turn's discounted return relative to the turns that it is compared with.

        R_{i,k} = sum_{j>=k} gamma^(j-k) r_{i,j}      A_{i,k} = (R_{i,k} - mean) / (std + eps)

    Mean and std are over all turns of all siblings, as in Kevin (2507.11948, gamma 0.4: every turn is a sample of its
    own); with `same_number` they are over turn k of the siblings, as in MT-GRPO (2505.11821).

    Args:
        rewards: [N, K] the reward of each turn; a reward for the whole is at the last turn.
        mask: [N, K] true for turns that exist.
        group_ids: [N] the prompt of each sequence.
        gamma: discount per turn.
        baseline, std: as in `group_advantages`; a turn that is compared with no other has advantage 0.

    Returns:
        [N, K], 0 outside the mask.
    """
    inside = mask.bool()
    returns = returns_to_go(rewards, inside, gamma)
    number = torch.arange(rewards.shape[1]).expand(rewards.shape)
    peers = group_ids[:, None] * rewards.shape[1] + (number if same_number else torch.zeros_like(number))
    advantages = torch.zeros_like(rewards)
    advantages[inside] = group_advantages(returns[inside], peers[inside], baseline=baseline, std=std, eps=eps)
    return advantages
