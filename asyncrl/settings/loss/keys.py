"""The settings under `loss`, filled by Hydra: names and meaning."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(kw_only=True, slots=True)
class LossConfig:
    """A preset and changes to it. None keeps the preset's value; a key that the preset does not use is refused."""

    preset: str = "dppo_tv"
    """A named loss (`loss=NAME`); docs/losses.md says which to take when. The other settings of this group change parts
    of it."""
    function: str | None = None
    """With `loss=custom`: your function, `file.py:name` or `package.module:name`. It takes `asyncrl.losses.LossInputs`
    and returns the loss of each token; see docs/custom_losses.md."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of `function`: `loss.args.NAME=VALUE`. A class is instantiated with them."""
    edge: str | None = None
    """Which ratio the surrogate uses: `B` proximal/behavior, `U` learner/proximal, `E` learner/behavior. Where the
    preset leaves it open: `U` if proximal log-probs are given, else `E`."""
    level: str | None = None
    """What the ratio is taken over: each `token`, the `sequence` (product of its tokens' ratios), its `geometric` mean,
    `gspo_token`, or the geometric mean of a turn (`segment`)."""
    aggregation: str | None = None
    """How token losses are combined: a mean over tokens, sequences or prompts, a sum, or division by a `constant`
    length."""
    clip_low: float | None = None
    """The ratio is clipped below 1 - clip_low (for `gmpo`: the log-ratio below -clip_low)."""
    clip_high: float | None = None
    """The ratio is clipped above 1 + clip_high (for `gmpo`: the log-ratio above clip_high)."""
    dual_clip: float | None = None
    """Cap c on the loss of a token with a negative advantage A: at most -A c."""
    delta: float | None = None
    """Largest ratio that counts for a token with a negative advantage (two-sided clipping); must be above 1 +
    clip_high."""
    sat_quantile: float | None = None
    """Narrow the clip range of tokens whose |log ratio| is above this quantile of the batch, the more the further out
    they are (SAT, arXiv 2607.18722; its authors take 0.9). 0: off."""
    ratio_floor: float | None = None
    """Lower bound of the ratio as a weight without gradient (`cispo`, `scale_rl`; `topr`, where the advantage is not
    positive)."""
    ratio_cap: float | None = None
    """Upper bound of the ratio, as of `ratio_floor`; also of `aipo`, and of the weight in `dppo_tv` and `dppo_kl`."""
    band_low: float | None = None
    """Tokens whose ratio is at or below this contribute nothing (`dis`)."""
    band_high: float | None = None
    """Tokens whose ratio is at or above this contribute nothing (`dis`)."""
    divergence_low: float | None = None
    """How far a token's probability may fall before it stops contributing (in `dppo_*` only where the advantage is
    negative). A difference of probabilities, or nats for `dppo_kl`."""
    divergence_high: float | None = None
    """How far a token's probability may rise before it stops contributing (in `dppo_*` only where the advantage is
    positive). Same unit."""
    weight: str | None = None
    """Behavior weight w = proximal/behavior on each token: `none`, `truncate` min(w, high), `clip` into [low, high],
    `zero` (w inside, 0 outside), `mask` (1 inside, 0 outside), or `self_normalize` (truncated, divided by its mean)."""
    weight_level: str | None = None
    """What the behavior weight is taken over: each `token`, the whole `sequence` (product), its `geometric` mean, or
    the turn (`segment`)."""
    weight_low: float | None = None
    """Lower bound of the behavior weight."""
    weight_high: float | None = None
    """Upper bound of the behavior weight."""
    opsm_delta: float | None = None
    """Sequences with a negative advantage whose mean log(behavior/learner) is above this contribute nothing."""
    reject: str | None = None
    """Statistic by which tokens or sequences are rejected, on the edge E (B if a proximal policy is used); `none`
    rejects nothing."""
    reject_scope: str | None = None
    """Whether the statistic is taken per `token`, or as its mean, sum or maximum over the sequence."""
    reject_low: float | None = None
    """A token (or sequence) whose statistic is below this is rejected."""
    reject_high: float | None = None
    """A token (or sequence) whose statistic is above this is rejected."""
    reject_gate: str | None = None
    """Reject everywhere (`none`), only where the advantage is `negative`, or only where the update would move the ratio
    further away from 1 (`outward`)."""
    veto: float | None = None
    """Sequences with any token ratio below this are rejected whole (same edge as `reject`)."""
    max_age: int | None = None
    """Tokens older than this, in policy versions, are rejected."""
    denominator: str | None = None
    """Whether rejected tokens count when the loss is averaged: `keep` counts them; `renormalize` does not, for one more
    forward pass of each minibatch."""
    centering: bool | None = None
    """Remove the mean score under the sampler from the gradient (score centering, arXiv 2609.20807), using the
    likeliest tokens that the engine recorded (`engine.record_topk`). For losses of single tokens."""
    tau_pos: float | None = None
    """Temperature of the sigmoid where the advantage is positive (`sapo`)."""
    tau_neg: float | None = None
    """Temperature of the sigmoid where the advantage is not positive (`sapo`)."""
    beta: float | None = None
    """Strength of the regression to the behavior policy (`dro`)."""
    epsilon: float | None = None
    """Width of the quadratic trust region (`drpo`)."""
    m2_tau: float | None = None
    """Bound on the second moment of the log-ratio (`m2po_*`)."""
    kl: str | None = None
    """Estimator of the KL to the reference policy; `+` takes the gradient of k2, `ratio_` multiplies by the ratio."""
    kl_coef: float | None = None
    """Coefficient of the KL to the reference policy in the loss; 0: none."""
    behavior_kl: float | None = None
    """Coefficient of the squared difference between the log-probs of learner and behavior policy, over all loss tokens;
    0: none. Pulls the policy towards old data; it has no gradient on data of the policy itself."""
    entropy_coef: float | None = None
    """Coefficient of an entropy bonus for each loss token, combined like the losses and subtracted from them, with
    gradient."""
    constant_length: float | None = None
    """Length in tokens by which the `constant` aggregation divides; usually `rollout.max_new_tokens`."""


KEYS: tuple[str, ...] = tuple(f.name for f in fields(LossConfig) if f.name != "preset")
