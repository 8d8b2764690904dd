"""The operations of a decoder, each output row a function of its input row alone. Forward only, without gradient."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asyncrl.exact.arithmetic import bits_for, exp, log, on_grid, power_below, to_units

SCORES = 1 << 22
"""Number of attention scores, or logits, computed at a time: 32 MiB in float64."""
_SUM_UNIT, _SHARE_UNIT, _VALUE_BITS = 2.0**-30, 2.0**-26, 24
"""Attention sums weights below 2 in units of 2^-30, which is exact for up to 2^21 keys. Then it sums shares, which add
up to 1, in units of 2^-26, times values of 24 bits: 2^51 units at most, for any number of keys."""


def rounded_weight(weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
    """The rounded weight, float64, that `linear` multiplies by. Valid until the weight changes."""
    return on_grid(weight, bits_for(weight.shape[-1]))


def linear(
    x: Float[Tensor, "*rows in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "*rows out"]:
    """float32 x W^T + b.

    Args:
        weight: result of `rounded_weight`.
    """
    out = (on_grid(x, bits_for(x.shape[-1])) @ weight.t()).float()
    return out if bias is None else out.add_(bias)


def rms_norm(x: Float[Tensor, "*rows n"], weight: Float[Tensor, " n"], epsilon: float) -> Float[Tensor, "*rows n"]:
    """RMS norm in float32."""
    wide = on_grid(x, bits_for(x.shape[-1]))
    mean = (wide * wide).sum(-1, keepdim=True) / x.shape[-1]
    return weight * (x * (1.0 / (mean + epsilon).sqrt()).float())


def silu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """float32 x / (1 + e^-x)."""
    wide = x.double()
    return (wide / exp(-wide).add_(1.0)).float()


def logsumexp(logits: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows"]:
    """Log-sum-exp in float32."""
    unit = 2.0 ** (math.ceil(math.log2(max(logits.shape[-1], 2))) - 51)
    # In chunks of rows: with a large vocabulary the float64 copies of all rows would take gigabytes.
    rows = logits.reshape(-1, logits.shape[-1]).split(max(1, SCORES // logits.shape[-1]))
    return torch.cat([_logsumexp(some, unit) for some in rows]).view(logits.shape[:-1])


def _logsumexp(logits: Float[Tensor, "rows V"], unit: float) -> Float[Tensor, " rows"]:
    largest = logits.amax(-1).double()
    weights = exp(logits.double() - largest[:, None])
    return (largest + log(to_units(weights, unit).sum(-1))).float()


def log_softmax(logits: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
    """Log-softmax in float32."""
    return logits - logsumexp(logits)[..., None]


def attention(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    scale: float,
    mask: Bool[Tensor, "batch 1 queries keys"] | None,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """float32 softmax(q k^T * scale) v.

    Args:
        mask: true where a query attends to a key; None for causal, with as many queries as keys.
    """
    queries, keys = query.shape[2], key.shape[2]
    query, key = on_grid(query, bits_for(query.shape[-1])), on_grid(key, bits_for(key.shape[-1]))
    sizes = power_below(value.abs().amax(-1).double())
    sizes = torch.where(sizes > 0, sizes, 1.0)
    value = on_grid(value, _VALUE_BITS).div_(sizes[..., None])
    width = max(1, SCORES // (query.shape[0] * query.shape[1] * keys))
    parts = []
    for start in range(0, queries, width):
        stop = min(start + width, queries)
        if mask is None:
            # Keys after the last of these queries are masked for all of them.
            seen, seeable = torch.arange(stop)[None] <= torch.arange(start, stop)[:, None], stop
        else:
            seen, seeable = mask[:, :, None, start:stop], keys
        parts.append(
            _attend(
                query[:, :, start:stop],
                key[:, :, :seeable],
                value[:, :, :seeable],
                sizes[:, :, None, None, :seeable],
                scale,
                seen.to(query.device),
            )
        )
    return torch.cat(parts, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, sizes: Tensor, scale: float, seen: Tensor) -> Tensor:
    """Attention for some of the queries; `value` is divided by the `sizes` [batch, kv_heads, 1, 1, keys]."""
    batch, heads, queries, width = query.shape
    shared = key.shape[1]
    rows = query.reshape(batch, shared, -1, width)  # the query heads that share a key head are rows of one product
    scores = (rows @ key.mT).view(batch, shared, heads // shared, queries, -1).mul_(scale)
    scores = scores.masked_fill_(~seen, -torch.inf)
    weights = to_units(exp(scores.sub_(scores.amax(-1, keepdim=True))), _SUM_UNIT)
    together = weights.sum(-1, keepdim=True)
    weights = weights.mul_(sizes)
    largest = power_below(weights.amax(-1, keepdim=True))
    weights = weights.div_(largest)
    total = to_units(weights, _SUM_UNIT).sum(-1, keepdim=True)
    shares = to_units(weights.div_(total), _SHARE_UNIT)
    out = (shares.view(batch, shared, -1, key.shape[2]) @ value).view(batch, shared, -1, queries, value.shape[-1])
    return (out * (largest * total / together)).float().view(batch, heads, queries, -1)
