"""What Hydra fills under `loss`: the names and their meaning. Torch-free, and knows neither presets nor rules."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(kw_only=True, slots=True)
class LossConfig:
    """A preset and what to change in it. None keeps the preset's value; a key the preset does not use is refused."""

    preset: str = "dppo_tv"
    """A named loss (`loss=NAME`); docs/losses.md says which when. All other keys change something in it."""
    function: str | None = None
    """With `loss=own`: yours, `file.py:name` or `package.module:name`. It takes `asyncrl.losses.LossInputs` and returns
    the loss of each token; how these are added up says `aggregation`. See docs/own_learning.md."""
    args: dict[str, Any] = field(default_factory=dict)
    """Its arguments: `loss.args.NAME=VALUE`. A function is called with them, a class made with them."""
    edge: str | None = None
    """Edge of the surrogate: `B` proximal/behavior, `U` learner/proximal, `E` learner/behavior. Where the preset
    leaves it open: `U` if proximal log-probs are given, else `E`."""
    level: str | None = None
    """Ratio of the `token`, the `sequence` product, its `geometric` mean, `gspo_token`, or the turn's (`segment`)
    geometric mean."""
    aggregation: str | None = None
    """How the losses of tokens are added up: means over tokens, sequences, prompts, or a `constant` length."""
    clip_low: float | None = None
    """Lower bound of the ratio is 1 - clip_low (for `gmpo`: of the log-ratio, -clip_low)."""
    clip_high: float | None = None
    """Upper bound of the ratio is 1 + clip_high (for `gmpo`: of the log-ratio, clip_high)."""
    dual_clip: float | None = None
    """Cap c > 1 on the loss of tokens with a negative advantage: at most -A c."""
    delta: float | None = None
    """Two-sided cap on the unclipped ratio; more than 1 + clip_high."""
    sat_quantile: float | None = None
    """Staleness-adaptive trust region (SAT, 2607.18722): of the tokens whose |log ratio| is above this quantile of the
    batch, the clip range is narrower the further out they are. 0 is off; the authors take 0.9."""
    ratio_floor: float | None = None
    """Absolute bounds of a detached ratio."""
    ratio_cap: float | None = None
    """The upper one; of `divergence_*` the cap of the ratio."""
    band_low: float | None = None
    """Absolute, exclusive bounds: tokens whose ratio is outside give nothing."""
    band_high: float | None = None
    """The upper one."""
    divergence_low: float | None = None
    """Largest divergence downwards (advantage < 0), as a probability difference or in nats."""
    divergence_high: float | None = None
    """Largest divergence upwards (advantage > 0), in the same unit."""
    weight: str | None = None
    """Behavior weight w = proximal/behavior: `none`, `truncate` min(w, high), `clip`, `zero` outside [low, high],
    `mask` (1 inside, 0 outside) or `self_normalize` (truncated, then divided by its mean)."""
    weight_level: str | None = None
    """That of the `token`, or of its whole `sequence`, `geometric` mean or turn (`segment`)."""
    weight_low: float | None = None
    """Lower bound of the behavior weight."""
    weight_high: float | None = None
    """Upper bound of the behavior weight."""
    opsm_delta: float | None = None
    """Sequences with A < 0 whose mean log(behavior/learner) is above this give nothing."""
    reject: str | None = None
    """Statistic of the edge E (B where a proximal policy is used) by which tokens or sequences are rejected."""
    reject_scope: str | None = None
    """The statistic of each token, or its mean, sum or largest value over the sequence."""
    reject_low: float | None = None
    """Below this the token, or the sequence, is rejected."""
    reject_high: float | None = None
    """Above this too."""
    reject_gate: str | None = None
    """Reject only where A < 0 (`negative`) or where the update would move further away (`outward`)."""
    veto: float | None = None
    """Sequences with any ratio below this (same edge as `reject`) are rejected whole."""
    max_age: int | None = None
    """Tokens older than this, in policy versions, are rejected."""
    denominator: str | None = None
    """`keep` counts rejected tokens, `renormalize` does not: one more forward of each minibatch finds how many stay."""
    centering: bool | None = None
    """Take the mean of the (weighted) score under the sampler out of the gradient (score centering, 2609.20807), from
    the likeliest tokens that the engine recorded: needs `engine.record_topk`. For losses of single tokens."""
    tau_pos: float | None = None
    """Temperature of the sigmoid where the advantage is not negative (`sapo`)."""
    tau_neg: float | None = None
    """Temperature of the sigmoid where the advantage is negative (`sapo`)."""
    beta: float | None = None
    """Strength of the regression to the behavior policy (`dro`)."""
    epsilon: float | None = None
    """Width of the quadratic trust region (`drpo`)."""
    m2_tau: float | None = None
    """Bound on the second moment of the log-ratio (the `m2po_*` presets)."""
    kl: str | None = None
    """Estimator of the KL to the reference policy; `+` takes the gradient of k2, `ratio_` multiplies by the ratio."""
    kl_coef: float | None = None
    """Price of the KL to the reference policy in the loss."""
    behavior_kl: float | None = None
    """Coefficient of (learner - behavior)^2 in log-probs, over all loss tokens."""
    entropy_coef: float | None = None
    """Bonus for the entropy of the policy at each loss token, over what it is sampled from, with gradient: so much
    times the entropy, added up as the losses are, is taken from the loss."""
    constant_length: float | None = None
    """Length by which the `constant` aggregation divides; usually `rollout.max_new_tokens`."""


KEYS: tuple[str, ...] = tuple(f.name for f in fields(LossConfig) if f.name != "preset")
