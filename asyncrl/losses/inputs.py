"""Inputs of a loss. All tensors are packed, [T], with one entry per token of the micro-batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TopK:
    """The most likely tokens of the distributions that loss tokens were sampled from; for `loss.centering`."""

    places: Int[Tensor, " C"]
    """Index in [T] of the token that each row belongs to. Each loss token has one row."""
    learner_logprobs: Float[Tensor, "C k"]
    """Log-probs of these tokens under the trained policy, over the whole vocabulary; with gradient."""
    behavior_logprobs: Float[Tensor, "C k"]
    """Log-probs as the engine recorded them, not renormalised over the k; -inf if it recorded fewer."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Facts about the ids in `LossInputs` that are known on the host: reading the ids synchronises with the GPU."""

    sequences: int
    """Upper bound: all `sequence_ids` are below it."""
    groups: int
    """Upper bound: all `group_ids` are below it."""
    ages: tuple[int, ...]
    """The distinct values of `staleness` among the loss tokens."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Packed tokens of one micro-batch. Gradient flows through `learner_logprobs`, and through others where noted.

    Values at tokens outside `loss_mask` do not matter: they may be anything, including NaN. A behavior, proximal or
    reference log-prob that is NaN or -inf counts as not recorded, with a ratio of exactly 1.
    """

    learner_logprobs: Float[Tensor, " T"]
    behavior_logprobs: Float[Tensor, " T"]
    advantages: Float[Tensor, " T"]
    loss_mask: Bool[Tensor, " T"]
    sequence_ids: Int[Tensor, " T"]
    """Sequence of each token; any integers >= 0. A sequence is never split between micro-batches."""
    group_ids: Int[Tensor, " T"] | None = None
    """Prompt of each token; for `aggregation=prompt_mean`."""
    proximal_logprobs: Float[Tensor, " T"] | None = None
    ref_logprobs: Float[Tensor, " T"] | None = None
    entropy: Float[Tensor, " T"] | None = None
    """Reported as a metric; with `entropy_coef` also the bonus, with gradient."""
    staleness: Int[Tensor, " T"] | None = None
    """Policy versions between the token and the learner; for `a3po`, `max_age` and the staleness tables."""
    group_tokens: Float[Tensor, " T"] | None = None
    """Loss tokens of the token's whole group; for `prompt_mean` if a group is split between micro-batches."""
    topk: TopK | None = None
    """For `loss.centering`. Gradient also flows through its `learner_logprobs`."""
    bounds: Bounds | None = None
    """If None, they are computed from the ids."""


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over the whole optimizer batch (all ranks and micro-batches), so that the parts' losses add up exactly."""

    tokens: float
    """Tokens with loss_mask."""
    sequences: float
    """Sequences with at least one such token."""
    groups: float
    """Groups with at least one such token."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of the whole optimizer batch (all ranks and micro-batches) before any gradient: counts of tokens
    that are not rejected, the divisors of `denominator=renormalize`, and statistics that some losses take over all
    tokens. Computed by a first pass over it, see `asyncrl.losses.kept`."""

    counts: Denominators = Denominators(tokens=0.0, sequences=0.0, groups=0.0)
    group_tokens: Float[Tensor, " groups"] = field(default_factory=lambda: torch.zeros(0))
    """Kept tokens of each group, by `group_ids`; empty if these are not given."""
    m2_limit: float = math.inf
    """Largest (log r)^2 that `m2po_areal` keeps, or that `m2po_paper` keeps of outward tokens."""
    m2_range: tuple[float, float] = (0.0, math.inf)
    """Range of ratios that `m2po_release` does not clip."""
    clip_tail: float = 0.0
    """|log r| beyond which `sat_quantile` narrows the clip range; 0: nowhere."""
    mean_weight: float = 1.0
    """Mean weight, the divisor of `weight=self_normalize`."""
