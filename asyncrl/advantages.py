"""Advantage estimators, as pure functions without gradient.

Shapes: [N] one entry per sequence; [B, T] padded tokens, with `mask` true (or 1) on the tokens the policy sampled.
Values at masked tokens are never read. float32 in, float32 out; float64 likewise.

A sample that failed or was rejected must not be in the arrays: it would move its siblings' baseline.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from asyncrl.errors import ConfigError

BASELINES = ("mean", "loo", "opo", "none")
STDS = ("none", "group", "batch")

Mask = Float[Tensor, "B T"] | Int[Tensor, "B T"] | Tensor


@torch.no_grad()
def group_advantages(
    rewards: Float[Tensor, " N"],
    group_ids: Int[Tensor, " N"],
    baseline: str = "mean",
    std: str = "none",
    lengths: Tensor | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, " N"]:
    """Reward minus the group's baseline, optionally over a standard deviation; 0 for a sample without siblings.

    With `baseline=none` a sample needs no siblings and keeps its reward, unless `std=group`.

    Args:
        rewards: [N] one per sequence.
        group_ids: [N] which prompt; siblings need not be neighbours.
        baseline: `mean` of the group (GRPO), `loo` mean of the others (RLOO), `opo` mean weighted by length, `none`.
        std: divide by (standard deviation + eps) of the `group`'s rewards (GRPO) or of all rewards in the `batch`,
            with ddof 1; `none` (Dr. GRPO) does not divide.
        lengths: [N] loss tokens of each sequence; only for `opo`.
        eps: added to the standard deviation, outside the root.

    Raises:
        ConfigError: unknown `baseline` or `std`, or `opo` without `lengths`.
    """
    if baseline not in BASELINES:
        raise ConfigError(f"advantage.baseline must be one of {', '.join(BASELINES)}; got {baseline!r}")
    if std not in STDS:
        raise ConfigError(f"advantage.std must be one of {', '.join(STDS)}; got {std!r}")
    groups = _Groups(group_ids, rewards)
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


class _Groups:
    """Sums over siblings, given back to each of them."""

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
    """GDPO (2601.05242): z-score each reward component within its group, add them weighted, whiten over the batch."""
    columns = [group_advantages(column, group_ids, "mean", "group", eps=eps) for column in rewards.unbind(1)]
    stacked = torch.stack(columns, 1)
    total = stacked.sum(1) if weights is None else stacked @ weights.to(stacked.dtype)
    if len(total) < 2:
        return torch.zeros_like(total)
    return (total - total.mean()) / (total.std(correction=1) + eps)


@torch.no_grad()
def masked_whiten(values: Float[Tensor, "B T"], mask: Mask) -> Float[Tensor, "B T"]:
    """Zero mean and unit variance over the masked-in tokens: ddof 0, variance at least 1e-8; 0 outside the mask.

    This is the convention of OpenRLHF and NeMo-RL; verl's and TRL's is ddof 1 with 1e-8 added to the variance.
    """
    inside = mask.bool()
    values = torch.where(inside, values, torch.zeros_like(values))
    count = inside.sum().clamp(min=1)
    centred = torch.where(inside, values - values.sum() / count, torch.zeros_like(values))
    variance = centred.square().sum() / count
    return centred * variance.clamp(min=1e-8).rsqrt()


@torch.no_grad()
def reinforce_plus_plus(
    token_rewards: Float[Tensor, "B T"],
    mask: Mask,
    gamma: float = 1.0,
    group_ids: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T"]:
    """REINFORCE++ (2501.03262): whitened returns-to-go. With `group_ids`, REINFORCE++-baseline.

    Args:
        token_rewards: [B, T] the KL in the reward included; observation tokens carry no reward and no discount.
        mask: [B, T].
        gamma: discount per sampled token.
        group_ids: [B] given: each sequence's summed reward minus its group's mean goes to all its tokens instead
            (`gamma` is then unused), so long sequences weigh more in the whitening, as in the authors' code.

    Returns:
        [B, T] advantages, whitened over the mask (`masked_whiten`), 0 outside it.
    """
    inside = mask.bool()
    rewards = torch.where(inside, token_rewards, torch.zeros_like(token_rewards))
    if group_ids is not None:
        groups = _Groups(group_ids, rewards.sum(1))
        scores = rewards.sum(1)
        centred = scores - groups.sum(scores) / groups.size
        return masked_whiten(centred[:, None].expand_as(rewards), mask)
    returns = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        running = torch.where(inside[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    return masked_whiten(returns, mask)


def length_adaptive_lambda(mask: Mask, alpha: float = 1.5) -> Float[Tensor, " B"]:
    """lambda = 1 - 1/(alpha |y|) of each sequence (VAPO; SAO uses alpha 1.5), for the policy's `gae`; at least 0."""
    if alpha <= 0:
        raise ConfigError(f"alpha of the length-adaptive lambda must be above 0; got {alpha}")
    lengths = mask.bool().sum(1).float()
    return 1.0 - 1.0 / (alpha * lengths).clamp(min=1.0)


@torch.no_grad()
def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Mask,
    gamma: float = 1.0,
    lam: float | Float[Tensor, " B"] = 0.95,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalised advantage estimation that jumps over observation tokens; no whitening.

    The last token of an action looks at the value of the first token of the next action. The value after the last
    sampled token is 0.

    Args:
        rewards, values, mask: [B, T].
        gamma: discount per sampled token.
        lam: one number, or one per sequence (`length_adaptive_lambda`).

    Returns:
        (advantages, returns = advantages + values), [B, T]; both 0 outside the mask.
    """
    inside = mask.bool()
    zero = torch.zeros_like(values)
    rewards, values = torch.where(inside, rewards, zero), torch.where(inside, values, zero)
    advantages = torch.zeros_like(values)
    next_value, running = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        here = inside[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(here, delta + gamma * lam * running, running)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = running
    advantages = torch.where(inside, advantages, zero)
    return advantages, torch.where(inside, advantages + values, zero)


@dataclass(frozen=True, slots=True)
class _Ratios:
    """The three clipped ratios of V-trace, [B, T]."""

    rho: Tensor
    c: Tensor
    pg_rho: Tensor


@torch.no_grad()
def vtrace(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    log_ratio: Float[Tensor, "B T"],
    mask: Mask,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """V-trace (1802.01561) over sampled tokens, jumping over observation tokens; bootstraps 0 after the last one.

    min(1, ratio) is one-sided, so noise of rms s in the log-ratio shortens the trace to about 2.5/s tokens. `c_bar`
    above 1 lengthens it again.

    Args:
        rewards, values: [B, T].
        log_ratio: [B, T] log(learner/behavior).
        mask: [B, T].
        gamma, lam: discount and trace decay per sampled token.
        rho_bar, c_bar, pg_rho_bar: caps of the ratio in the temporal difference (which fixed point), in the trace (how
            far credit travels) and in front of the policy gradient.

    Returns:
        (advantages, value_targets), [B, T], 0 outside the mask. With every ratio 1 the targets are GAE(lam)'s returns;
        the advantages are min(pg_rho_bar, ratio) (r + gamma (lam v' + (1 - lam) V') - V), rlax's form.
    """
    inside = mask.bool()
    zero = torch.zeros_like(values)
    rewards, values = torch.where(inside, rewards, zero), torch.where(inside, values, zero)
    ratio = torch.where(inside, log_ratio, zero).clamp(-20.0, 20.0).exp()
    ratios = _Ratios(ratio.clamp(max=rho_bar), lam * ratio.clamp(max=c_bar), ratio.clamp(max=pg_rho_bar))
    advantages, targets = torch.zeros_like(values), torch.zeros_like(values)
    next_value, next_target, error = (torch.zeros_like(values[:, 0]) for _ in range(3))
    for t in range(values.shape[1] - 1, -1, -1):
        here, value = inside[:, t], values[:, t]
        delta = ratios.rho[:, t] * (rewards[:, t] + gamma * next_value - value)
        error = torch.where(here, delta + gamma * ratios.c[:, t] * error, error)
        bootstrap = lam * next_target + (1 - lam) * next_value
        advantages[:, t] = ratios.pg_rho[:, t] * (rewards[:, t] + gamma * bootstrap - value)
        targets[:, t] = value + error
        next_value = torch.where(here, value, next_value)
        next_target = torch.where(here, targets[:, t], next_target)
    return torch.where(inside, advantages, zero), torch.where(inside, targets, zero)


@torch.no_grad()
def kl_in_reward(
    rewards: Float[Tensor, " B"],
    learner_logprobs: Float[Tensor, "B T"],
    ref_logprobs: Float[Tensor, "B T"],
    mask: Mask,
    coefficient: float,
) -> Float[Tensor, "B T"]:
    """Token rewards: -coefficient * (learner - ref) at every sampled token, plus the sequence's reward at its last."""
    inside = mask.bool()
    penalty = torch.where(inside, learner_logprobs - ref_logprobs, torch.zeros_like(learner_logprobs))
    token_rewards = -coefficient * penalty
    position = torch.arange(inside.shape[1], device=inside.device)
    last = (position * inside).amax(1)
    terminal = torch.where(inside.any(1), rewards, torch.zeros_like(rewards))
    return token_rewards.scatter_add(1, last[:, None], terminal[:, None].to(token_rewards.dtype))
