"""Rewards per token, and REINFORCE++, which whitens returns and needs no critic. [B, T] padded tokens."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from asyncrl.advantages.group import Groups
from asyncrl.advantages.scan import Stream, by_rows, scan
from asyncrl.advantages.whitening import masked_whiten


@torch.no_grad()
def returns_to_go(token_rewards: Float[Tensor, "B T"], mask: Tensor, gamma: float = 1.0) -> Float[Tensor, "B T"]:
    """Discounted sum of this and later rewards of the sequence, over sampled tokens; 0 outside the mask.

    Observation tokens have no reward and no discount.
    """

    def of_rows(rows: slice, stream: Stream) -> tuple[Tensor]:
        rewards = stream.take(token_rewards[rows])
        return (scan(rewards, stream.factors(gamma, rewards)),)

    (returns,) = by_rows(mask, token_rewards, of_rows, 1)
    return returns


@torch.no_grad()
def reinforce_plus_plus(
    token_rewards: Float[Tensor, "B T"],
    mask: Tensor,
    gamma: float = 1.0,
    group_ids: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T"]:
    """REINFORCE++ (2501.03262): whitened returns-to-go. With `group_ids`, REINFORCE++-baseline.

    Args:
        token_rewards: [B, T] including the KL penalty, if any (see `token_rewards`).
        mask: [B, T].
        gamma: discount per sampled token.
        group_ids: [B] if given, each sequence's summed reward minus its group's mean goes to all its tokens instead
            (`gamma` is then unused). So long sequences weigh more in the whitening, as in the authors' code.

    Returns:
        [B, T] advantages, whitened over the mask (`masked_whiten`, `ddof0`), 0 outside it.
    """
    if group_ids is None:
        return masked_whiten(returns_to_go(token_rewards, mask, gamma), mask)
    scores = torch.where(mask.bool(), token_rewards, torch.zeros_like(token_rewards)).sum(1)
    groups = Groups(group_ids, scores)
    centred = scores - groups.sum(scores) / groups.size
    return masked_whiten(centred[:, None].expand_as(token_rewards), mask)


@torch.no_grad()
def token_rewards(
    rewards: Float[Tensor, " B"], mask: Tensor, penalty: Float[Tensor, "B T"] | None = None
) -> Float[Tensor, "B T"]:
    """The negative `penalty` at every sampled token, plus the sequence's reward at its last one; 0 outside the mask.

    A sequence without a sampled token gets nothing.
    """
    inside = mask.bool()
    zeros = torch.zeros(inside.shape, dtype=rewards.dtype, device=inside.device)
    charged = zeros if penalty is None else torch.where(inside, -penalty, torch.zeros_like(penalty))
    position = torch.arange(inside.shape[1], device=inside.device)
    last = (position * inside).amax(1)
    terminal = torch.where(inside.any(1), rewards, torch.zeros_like(rewards))
    return charged.scatter_add(1, last[:, None], terminal[:, None].to(charged.dtype))
