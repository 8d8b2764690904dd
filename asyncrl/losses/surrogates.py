"""The surrogates: the loss of each token as a function of ratio and advantage. One function per shape.

Each returns `Shaped`: the loss per token (before weights, rejection and aggregation) and which tokens were clipped, by
side. `cur`, `old` are the log-probs at the two ends of the edge, `p`, `q` their probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asyncrl.losses.adaptive import contraction
from asyncrl.losses.ratios import LOG_RATIO_LIMIT, Tokens, at_level, edge_ends, probability
from asyncrl.settings.loss.keys import LossConfig

Sides = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class Shaped:
    """Output of a surrogate."""

    loss: Float[Tensor, " T"]
    """0 outside the loss mask."""
    sides: Callable[[], Sides] | None = None
    """Tokens whose updates were stopped or capped, (downwards, upwards); computed only for diagnostics."""
    numbers: Mapping[str, Float[Tensor, " T"]] = field(default_factory=dict)
    """Metric names -> per-token values, whose means over the loss tokens are the metrics."""


def ratio_of(tokens: Tokens, config: LossConfig, edge: str) -> Float[Tensor, " T"]:
    """The ratio on `edge` at `config.level`, differentiable."""
    new, old = edge_ends(tokens, edge)
    return at_level(tokens, new - old, config.level or "token").exp()


def value(number: float | None) -> float:
    """A setting that `resolve()` has filled in, so that it is not None."""
    assert number is not None
    return number


def pick(where: Bool[Tensor, " T"], yes: float, no: float, like: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """`torch.where` of two numbers in the dtype of `like`; `torch.where` alone would round them to float32."""
    # Filled on the device: a copy from the host would wait for all work queued there.
    return torch.where(where, like.new_full((), yes), like.new_full((), no))


def clip(tokens: Tokens, config: LossConfig, edge: str) -> Shaped:
    """max(-A r, -A clip(r)), with the optional caps: dual (A < 0: at most -A c) and two-sided (r at most delta).

    With `sat_quantile` the range of outlying tokens is narrower (`adaptive.py`).
    """
    low, high = value(config.clip_low), value(config.clip_high)
    ratio = ratio_of(tokens, config, edge)
    if not config.sat_quantile:
        return clip_between(tokens, config, ratio, 1 - low, 1 + high)
    far = log_ratio_of(tokens, config, edge)
    scale = contraction(far, tokens.whole.clip_tail)
    below, above = (torch.where(side, scale, torch.ones_like(scale)) for side in (far < 0, far > 0))
    shaped = clip_between(tokens, config, ratio, 1 - low * below, 1 + high * above)
    return replace(shaped, numbers={"sat/gated": (scale < 1).to(scale.dtype), "sat/contraction": scale})


def log_ratio_of(tokens: Tokens, config: LossConfig, edge: str) -> Float[Tensor, " T"]:
    """The log of `ratio_of`, without gradient."""
    new, old = edge_ends(tokens, edge)
    return at_level(tokens, (new - old).detach(), config.level or "token")


def clip_between(
    tokens: Tokens, config: LossConfig, ratio: Tensor, low: float | Tensor, high: float | Tensor
) -> Shaped:
    """The maximum of the two products, by the sign of A: -A min(r, high) where A > 0, -A max(r, low) where A < 0.

    Same values and gradients as `torch.maximum` in a third of the time: the backward of `torch.maximum` is the slowest
    part of PPO.
    """
    advantages = tokens.advantages
    caps = [cap for cap in (config.dual_clip, config.delta) if cap is not None]
    rise, fall = advantages.clamp(min=0), advantages.clamp(max=0)
    held = ratio.clamp(min=low)
    loss = -(rise * ratio.clamp(max=high) + fall * (held.clamp(max=min(caps)) if caps else held))
    frozen = ratio.detach()
    return Shaped(loss, lambda: ((frozen < low) & (advantages < 0), (frozen > high) & (advantages > 0)))


def detached(tokens: Tokens, config: LossConfig, edge: str) -> Shaped:
    """-sg[clip(r, floor, cap)] A cur (CISPO, ScaleRL)."""
    ratio = ratio_of(tokens, config, edge).detach()
    low, high = value(config.ratio_floor), value(config.ratio_cap)
    return Shaped(-ratio.clamp(low, high) * tokens.advantages * tokens.cur, lambda: (ratio < low, ratio > high))


def tapered(tokens: Tokens, config: LossConfig, edge: str) -> Shaped:
    """TOPR: weight 1 where A > 0, sg[clip(r, floor, cap)] elsewhere."""
    ratio = ratio_of(tokens, config, edge).detach()
    low, high = value(config.ratio_floor), value(config.ratio_cap)
    positive = tokens.advantages > 0
    weight = torch.where(positive, torch.ones_like(ratio), ratio.clamp(low, high))
    loss = -weight * tokens.advantages * tokens.cur
    return Shaped(loss, lambda: (~positive & (ratio < low), ~positive & (ratio > high)))


def capped(tokens: Tokens, config: LossConfig, edge: str) -> Shaped:
    """AIPO: -min(r, cap) A, differentiable; above the cap the gradient is 0."""
    ratio = ratio_of(tokens, config, edge)
    cap = value(config.ratio_cap)
    return Shaped(-ratio.clamp(max=cap) * tokens.advantages, lambda: (None, ratio.detach() > cap))


def band(tokens: Tokens, config: LossConfig, edge: str) -> Shaped:
    """DIS: -sg[r 1(low < r < high)] A cur."""
    ratio = ratio_of(tokens, config, edge).detach()
    low, high = ratio <= value(config.band_low), ratio >= value(config.band_high)
    weight = torch.where(low | high, torch.zeros_like(ratio), ratio)
    return Shaped(-weight * tokens.advantages * tokens.cur, lambda: (low, high))


def divergence_tv(tokens: Tokens, config: LossConfig, edge: str) -> Shaped:
    """DPPO-TV: tokens that would move further than the bound in probability contribute nothing."""
    new, old = edge_ends(tokens, edge)
    gap = probability(new.detach()) - probability(old)
    return _gated(tokens, config, edge, gap < -value(config.divergence_low), gap > value(config.divergence_high))


def divergence_kl(tokens: Tokens, config: LossConfig, edge: str) -> Shaped:
    """DPPO-KL: like TV, measured by the KL between (token, all others) under the two policies."""
    new, old = edge_ends(tokens, edge)
    new = new.detach()
    distance = binary_kl(new, old)
    low = (distance > value(config.divergence_low)) & (new < old)
    high = (distance > value(config.divergence_high)) & (new > old)
    return _gated(tokens, config, edge, low, high)


def _gated(tokens: Tokens, config: LossConfig, edge: str, far_low: Tensor, far_high: Tensor) -> Shaped:
    """-A sg[min(r, cap)] cur, for tokens whose update does not lead further out."""
    held_high = far_high & (tokens.advantages > 0)
    held_low = far_low & (tokens.advantages < 0)
    ratio = ratio_of(tokens, config, edge).detach().clamp(max=value(config.ratio_cap))
    weight = torch.where(held_high | held_low, torch.zeros_like(ratio), ratio)
    return Shaped(-tokens.advantages * weight * tokens.cur, lambda: (held_low, held_high))


def divergence_blind(tokens: Tokens, config: LossConfig, edge: str) -> Shaped:
    """IPO of prime-rl: -A r, differentiable, for tokens inside the bound, whatever the sign of A."""
    new, old = edge_ends(tokens, edge)
    gap = probability(new.detach()) - probability(old)
    low, high = gap < -value(config.divergence_low), gap > value(config.divergence_high)
    loss = -tokens.advantages * ratio_of(tokens, config, edge)
    return Shaped(torch.where(low | high, torch.zeros_like(loss), loss), lambda: (low, high))


def binary_kl(new: Float[Tensor, " T"], old: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """q log(q/p) + (1-q) log((1-q)/(1-p)) with p = exp(new), q = exp(old). Not meant to be differentiated.

    1e-8 keeps the logarithm finite for a token with probability 1 (verl's constant).
    """
    p, q = probability(new), probability(old)
    return q * (old - new) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))


def gmpo(tokens: Tokens, config: LossConfig, edge: str) -> Shaped:
    """-A exp(mean_t of the log-ratio clipped on the side the advantage pushes to); A is its mean over the sequence."""
    new, old = edge_ends(tokens, edge)
    # Clamped per token, so that a single extreme token does not push the whole mean out of the range of `exp`.
    log_ratio = (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    sign = tokens.advantages.sign()
    low, high = -value(config.clip_low), value(config.clip_high)
    clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(low, high))
    ratio = at_level(tokens, clipped, "geometric").exp()
    parts = tokens.sequences
    loss = -parts.spread(parts.mean(tokens.advantages)) * ratio
    frozen = log_ratio.detach()
    return Shaped(loss * tokens.mask, lambda: ((frozen < low) & (sign < 0), (frozen > high) & (sign > 0)))


def sapo(tokens: Tokens, config: LossConfig, edge: str) -> Shaped:
    """-A (4/tau) sigmoid(tau (r - 1)): the gradient fades with distance instead of stopping at an edge."""
    ratio = ratio_of(tokens, config, edge)
    positive = tokens.advantages > 0
    tau = pick(positive, value(config.tau_pos), value(config.tau_neg), ratio)
    return Shaped(-tokens.advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau)


VESPO_POSITIVE = (2.0, 3.0)
"""(k, lambda) of phi(w) = e^lambda w^k e^(-lambda w) where A >= 0; the paper's values."""
VESPO_NEGATIVE = (3.0, 2.0)
VESPO_LOG_FLOOR = math.log(1e-8)


def vespo(tokens: Tokens, config: LossConfig, edge: str) -> Shaped:
    """-sg[phi(w)] A cur with w the sequence product: sequences far from w = 1 fade out on both sides."""
    new, old = edge_ends(tokens, edge)
    log_ratio = (new.detach() - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    parts = tokens.sequences
    log_w = parts.spread(parts.sum(log_ratio)).clamp(VESPO_LOG_FLOOR, LOG_RATIO_LIMIT)
    positive = tokens.advantages >= 0
    k = pick(positive, VESPO_POSITIVE[0], VESPO_NEGATIVE[0], log_w)
    lam = pick(positive, VESPO_POSITIVE[1], VESPO_NEGATIVE[1], log_w)
    phi = (lam + k * log_w - lam * log_w.exp()).exp()
    return Shaped(-phi * tokens.advantages * tokens.cur)


def drpo(tokens: Tokens, config: LossConfig, edge: str) -> Shaped:
    """-A r + |A| q (r - 1)^2 / (2 epsilon): quadratic trust region, wider for rare tokens."""
    _, old = edge_ends(tokens, edge)
    ratio = ratio_of(tokens, config, edge)
    penalty = tokens.advantages.abs() * probability(old) * (ratio - 1).square() / (2 * value(config.epsilon))
    return Shaped(-tokens.advantages * ratio + penalty)


def dro(tokens: Tokens, config: LossConfig, edge: str) -> Shaped:
    """-(A cur - beta/2 (cur - old)^2): regression, no ratio."""
    new, old = edge_ends(tokens, edge)
    return Shaped(-(tokens.advantages * tokens.cur - 0.5 * value(config.beta) * (new - old).square()))


def outward_of(tokens: Tokens, edge: str) -> Bool[Tensor, " T"]:
    """Loss tokens that the update would move further away from the old policy."""
    new, old = edge_ends(tokens, edge)
    return tokens.mask & ((new - old).detach() * tokens.advantages > 0)


def m2po_paper(tokens: Tokens, config: LossConfig, edge: str) -> Shaped:
    """-A r without the outward tokens of largest (log r)^2, dropped until the mean of the rest is <= m2_tau."""
    new, old = edge_ends(tokens, edge)
    keep = ~outward_of(tokens, edge) | ((new - old).detach().double().square() <= tokens.whole.m2_limit)
    loss = -tokens.advantages * ratio_of(tokens, config, edge)
    negative = tokens.advantages < 0
    return Shaped(torch.where(keep, loss, torch.zeros_like(loss)), lambda: (~keep & negative, ~keep & ~negative))


def m2po_release(tokens: Tokens, config: LossConfig, edge: str) -> Shaped:
    """PPO-clip with a range determined from the batch, as in the authors' code."""
    return clip_between(tokens, config, ratio_of(tokens, config, edge), *tokens.whole.m2_range)


def reinforce(tokens: Tokens, config: LossConfig, edge: str) -> Shaped:
    """-A cur."""
    return Shaped(-tokens.advantages * tokens.cur)


SURROGATES: dict[str, Callable[[Tokens, LossConfig, str], Shaped]] = {
    shape.__name__: shape
    for shape in (
        *(clip, detached, tapered, capped, band, divergence_tv, divergence_kl, divergence_blind),
        *(gmpo, sapo, vespo, drpo, dro, m2po_paper, m2po_release, reinforce),
    )
} | {"m2po_areal": clip}
"""`m2po_areal` is the clip; its mask on the edge B is a rejection (`rejection.py`)."""
