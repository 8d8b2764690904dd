"""Aggregation: the factor that each token's loss is multiplied by before all are summed.

Every factor is made of counts over the whole optimizer batch, so the losses of its micro-batches, on any rank, simply
add up. There is never a mean of means.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asyncrl.losses.inputs import Denominators
from asyncrl.losses.ratios import Segments, Tokens
from asyncrl.settings.loss.keys import LossConfig


def token_factors(
    tokens: Tokens, config: LossConfig, denominators: Denominators | None
) -> Float[Tensor, " T"] | Float[Tensor, ""]:
    """Factor of each token, or a single one for all; the caller applies the mask. Counts are those of `tokens.mask`."""
    mode = config.aggregation
    one = torch.ones((), dtype=tokens.cur.dtype, device=tokens.cur.device)
    if mode == "token_sum":
        return one
    if mode == "token_mean":
        return one / (tokens.mask.sum().clamp(min=1) if denominators is None else max(denominators.tokens, 1.0))
    if mode == "prompt_mean":
        parts, given = tokens.groups, tokens.raw.group_tokens
        per_group = parts.spread(parts.tokens) if given is None else given.to(one.dtype)
        return one / (per_group.clamp(min=1) * count_of(parts, denominators and denominators.groups))
    parts = tokens.sequences
    sequences = count_of(parts, denominators and denominators.sequences)
    if mode == "seq_mean_token_mean":
        return one / (parts.spread(parts.tokens.clamp(min=1)) * sequences)
    if mode == "seq_mean_token_sum":
        return one / sequences
    assert config.constant_length is not None
    return one / (sequences * config.constant_length)


def kept_factors(
    tokens: Tokens, keep: Bool[Tensor, " T"], config: LossConfig
) -> Float[Tensor, " T"] | Float[Tensor, ""]:
    """`token_factors` that count only the tokens of `keep`, over the whole optimizer batch."""
    groups, whole = tokens.raw.group_ids, tokens.whole
    per_group = None if groups is None else whole.group_tokens.to(groups.device)[groups.long()]
    counted = dataclasses.replace(
        tokens, raw=dataclasses.replace(tokens.raw, group_tokens=per_group), mask=keep, _parts={}
    )
    return token_factors(counted, config, whole.counts)


def count_of(parts: Segments, given: float | None) -> Tensor | float:
    """Number of parts with at least one loss token; at least 1, so that a batch without any gives 0 and not NaN."""
    return (parts.tokens > 0).sum().clamp(min=1) if given is None else max(given, 1.0)
