"""The behavior weight: a detached function of the ratio between the proximal (or current) and the behavior policy."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asyncrl.losses.ratios import Tokens, at_level
from asyncrl.settings.loss.keys import LossConfig


def behavior_weight(
    tokens: Tokens, config: LossConfig, log_ratio: Float[Tensor, " T"]
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """(weight, below `weight_low`, above `weight_high`) of each token; `log_ratio` is detached and raw."""
    level = config.weight_level or "token"
    low, high = config.weight_low or 0.0, config.weight_high
    assert high is not None
    ratio = at_level(tokens, log_ratio, level).exp()
    below, above = ratio < low, ratio > high
    if config.weight == "truncate":
        weight = ratio.clamp(max=high)
    elif config.weight == "clip":
        weight = ratio.clamp(low, high)
    elif config.weight == "zero":
        weight = torch.where(below | above, torch.zeros_like(ratio), ratio)
    elif config.weight == "mask":
        weight = torch.where(below | above, torch.zeros_like(ratio), torch.ones_like(ratio))
    else:
        weight, mean = ratio.clamp(max=high), ratio.new_full((), tokens.whole.mean_weight)
        weight = torch.where(mean > 1e-8, weight / mean.clamp(min=1e-8), weight)
    return weight, below, above


def capped_weight(
    tokens: Tokens, config: LossConfig, log_ratio: Float[Tensor, " T"]
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """For `weight=self_normalize`: sum and count (float64) of the weights of tokens, or of sequences if there is one
    weight per sequence."""
    level = config.weight_level or "token"
    assert config.weight_high is not None
    weight = at_level(tokens, log_ratio, level).exp().clamp(max=config.weight_high)
    counted = torch.where(tokens.mask, weight, torch.zeros_like(weight))
    if level in ("sequence", "geometric"):
        parts = tokens.sequences
        return parts.mean(counted).double().sum(), (parts.tokens > 0).double().sum()
    return counted.double().sum(), tokens.mask.double().sum()
