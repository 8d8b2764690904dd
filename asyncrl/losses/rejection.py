"""Rejection: which loss tokens are left out of the loss entirely, and why."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.losses.ratios import LOG_RATIO_LIMIT, Tokens, probability
from asyncrl.losses.surrogates import binary_kl
from asyncrl.settings.loss.keys import LossConfig


def rejections(tokens: Tokens, config: LossConfig) -> dict[str, Bool[Tensor, " T"]]:
    """Rejected tokens by reason; only for active reasons. Tokens outside the mask may be marked."""
    reasons: dict[str, Tensor] = {}
    if config.opsm_delta is not None:
        reasons["opsm"] = opsm(tokens, config.opsm_delta)
    if config.max_age is not None:
        if tokens.raw.staleness is None:
            raise ConfigError("loss.max_age needs staleness in LossInputs; pass it, or remove loss.max_age")
        reasons["age"] = tokens.raw.staleness > config.max_age
    if config.preset == "m2po_areal":
        reasons["m2"] = anchor_log_ratio(tokens).double().square() > tokens.whole.m2_limit
    if config.veto is not None:
        low = tokens.mask & (anchor_log_ratio(tokens).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() < config.veto)
        parts = tokens.sequences
        reasons["veto"] = parts.spread(parts.sum(low.to(tokens.cur.dtype))) > 0
    if config.reject not in (None, "none"):
        reasons[config.reject] = by_statistic(tokens, config)
    return reasons


def kept_tokens(
    tokens: Tokens, config: LossConfig, reasons: Mapping[str, Tensor], held: Mapping[str, Tensor]
) -> Bool[Tensor, " T"]:
    """Loss tokens that are not rejected; with `renormalize` also without those whose weight is 0."""
    renormalized = config.denominator == "renormalize" and config.weight in ("mask", "zero")
    keep = tokens.mask
    for left_out in (*reasons.values(), *(held.values() if renormalized else ())):
        keep = keep & ~left_out
    return keep


def anchor_log_ratio(tokens: Tokens) -> Float[Tensor, " T"]:
    """Detached log-ratio to the behavior policy: on B if there is a proximal policy, otherwise on E."""
    return (tokens.cur.detach() if tokens.prox is None else tokens.prox) - tokens.mu


def opsm(tokens: Tokens, delta: float) -> Bool[Tensor, " T"]:
    """Tokens with A < 0 in sequences whose mean log(behavior/learner) is above `delta`."""
    parts = tokens.sequences
    drift = parts.spread(parts.mean(tokens.mu - tokens.cur.detach()))
    return (tokens.advantages < 0) & (drift > delta)


def by_statistic(tokens: Tokens, config: LossConfig) -> Bool[Tensor, " T"]:
    """Tokens whose statistic, over `reject_scope`, is outside [reject_low, reject_high].

    The statistics, with r = anchor/behavior: `ratio` r (its mean over a sequence is the geometric one, its sum the
    product), `k1` -log r, `k2` (log r)^2 / 2, `k3` r - 1 - log r, `tv` |p - q|, `binary_kl`.
    """
    log_ratio = anchor_log_ratio(tokens)
    statistic = token_statistic(tokens, config.reject or "", log_ratio)
    statistic = scoped(tokens, statistic, config.reject_scope or "token")
    if config.reject == "ratio":
        statistic = statistic.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    assert config.reject_low is not None and config.reject_high is not None
    rejected = (statistic < config.reject_low) | (statistic > config.reject_high)
    if config.reject_gate == "negative":
        rejected &= tokens.advantages < 0
    elif config.reject_gate == "outward":
        rejected &= tokens.advantages * log_ratio > 0
    return rejected


def token_statistic(tokens: Tokens, name: str, log_ratio: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """The statistic of each token; `ratio` stays in log space until it is taken over its scope."""
    if name == "ratio":
        return log_ratio
    if name == "k1":
        return -log_ratio
    if name == "k2":
        return 0.5 * log_ratio.square()
    if name == "k3":
        safe = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return safe.exp() - 1 - safe
    new, old = tokens.mu + log_ratio, tokens.mu
    values = (probability(new) - probability(old)).abs() if name == "tv" else binary_kl(new, old)
    return torch.where(tokens.mask, values, torch.zeros_like(values))


def scoped(tokens: Tokens, statistic: Float[Tensor, " T"], scope: str) -> Float[Tensor, " T"]:
    """Give every token the statistic of its scope."""
    if scope == "token":
        return statistic
    parts = tokens.sequences
    if scope == "sequence_mean":
        return parts.spread(parts.mean(statistic))
    if scope == "sequence_sum":
        return parts.spread(parts.sum(statistic))
    lowest = torch.where(tokens.mask, statistic, torch.full_like(statistic, -torch.inf))
    largest = statistic.new_full((parts.count,), -torch.inf).scatter_reduce(0, parts.index, lowest, "amax")
    return parts.spread(largest)
