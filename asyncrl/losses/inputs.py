"""What a loss is computed from. All tensors are packed, [T], one entry per token of the micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TopK:
    """The likeliest tokens of the distributions that loss tokens were sampled from; for `loss.centering`."""

    places: Int[Tensor, " C"]
    """Which of [T] each row is of. Each loss token has one row."""
    learner_logprobs: Float[Tensor, "C k"]
    """Of these tokens under the policy that is trained, over the whole vocabulary; with gradient."""
    behavior_logprobs: Float[Tensor, "C k"]
    """As the engine recorded them, not renormalised over the k; -inf where it recorded fewer."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the host knows of the ids in `LossInputs`: who looks at those on a GPU waits for all that it was told."""

    sequences: int
    """All of `sequence_ids` are below."""
    groups: int
    """The same of `group_ids`."""
    ages: tuple[int, ...]
    """Each `staleness` that a loss token has, once."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Packed tokens of one micro-batch. Gradient flows through `learner_logprobs`, and where said.

    Values at tokens outside `loss_mask` are never read: they may be anything, NaN included. A behavior,
    proximal or reference log-prob that is NaN or -inf counts as unscored, with a ratio of exactly 1.
    """

    learner_logprobs: Float[Tensor, " T"]
    behavior_logprobs: Float[Tensor, " T"]
    advantages: Float[Tensor, " T"]
    loss_mask: Bool[Tensor, " T"]
    sequence_ids: Int[Tensor, " T"]
    """Which sequence a token belongs to; any integers >= 0. A sequence is never split between micro-batches."""
    group_ids: Int[Tensor, " T"] | None = None
    """Which prompt; for `aggregation=prompt_mean`."""
    proximal_logprobs: Float[Tensor, " T"] | None = None
    ref_logprobs: Float[Tensor, " T"] | None = None
    entropy: Float[Tensor, " T"] | None = None
    """Reported; with `entropy_coef` the bonus, whose gradient flows through it."""
    staleness: Int[Tensor, " T"] | None = None
    """Policy versions between the token and the learner; for `a3po`, `max_age` and the staleness tables."""
    group_tokens: Float[Tensor, " T"] | None = None
    """Loss tokens of the token's whole group; for `prompt_mean` where a group is split between micro-batches."""
    topk: TopK | None = None
    """For `loss.centering`. Gradient flows through its `learner_logprobs`, too."""
    bounds: Bounds | None = None
    """Where they are not given they are looked for among the ids."""


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
    """What is known of the whole optimizer batch (all ranks and micro-batches) before any gradient: what no rejection
    leaves out, which `denominator=renormalize` divides by, and the statistics that some losses take over all tokens.
    From a first pass over it, see `asyncrl.losses.kept`."""

    counts: Denominators
    group_tokens: Float[Tensor, " groups"]
    """Kept tokens of each group, by `group_ids`; empty where those are not given."""
    m2_limit: float
    """Largest (log r)^2 that `m2po_areal` keeps, or `m2po_paper` of outward tokens."""
    m2_range: tuple[float, float] | None = None
    """Between which ratios `m2po_release` does not clip."""
    clip_tail: float | None = None
    """|log r| beyond which `sat_quantile` narrows the clip range."""
    mean_weight: float | None = None
    """What `weight=self_normalize` divides by."""
