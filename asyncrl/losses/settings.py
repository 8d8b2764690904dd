"""The settings under `loss`, filled by Hydra: names and meaning. Torch-free, without presets or rules."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(kw_only=True, slots=True)
class LossConfig:
    """A preset and changes to it. None keeps the preset's value; a key that the preset does not use is refused."""

    preset: str = "dppo_tv"
    """A named loss (`loss=NAME`); docs/losses.md says when to use which. All other keys change part of it."""
    function: str | None = None
    """With `loss=own`: your own loss, `file.py:name` or `package.module:name`. It takes `asyncrl.losses.LossInputs` and
    returns the loss of each token; `aggregation` says how these are summed. See docs/own_learning.md."""
    args: dict[str, Any] = field(default_factory=dict)
    """Its arguments: `loss.args.NAME=VALUE`. A function is called with them, a class constructed with them."""
    edge: str | None = None
    """Edge of the surrogate: `B` proximal/behavior, `U` learner/proximal, `E` learner/behavior. If the preset leaves it
    open: `U` if proximal log-probs are given, otherwise `E`."""
    level: str | None = None
    """Ratio of the `token`, the `sequence` product, its `geometric` mean, `gspo_token`, or the geometric mean of the
    turn (`segment`)."""
    aggregation: str | None = None
    """How the losses of tokens are summed: means over tokens, sequences, prompts, or a `constant` length."""
    clip_low: float | None = None
    """Lower bound of the ratio is 1 - clip_low (for `gmpo`: of the log-ratio, -clip_low)."""
    clip_high: float | None = None
    """Upper bound of the ratio is 1 + clip_high (for `gmpo`: of the log-ratio, clip_high)."""
    dual_clip: float | None = None
    """Cap c > 1 on the loss of tokens with a negative advantage: at most -A c."""
    delta: float | None = None
    """Two-sided cap on the unclipped ratio; must be more than 1 + clip_high."""
    sat_quantile: float | None = None
    """Staleness-adaptive trust region (SAT, 2607.18722): for tokens whose |log ratio| is above this quantile of the
    batch, the clip range is narrower the further out they are. 0 is off; the authors use 0.9."""
    ratio_floor: float | None = None
    """Lower bound of a detached ratio (absolute)."""
    ratio_cap: float | None = None
    """Upper bound of a detached ratio (absolute); for `divergence_*` the cap on the ratio."""
    band_low: float | None = None
    """Lower bound of the ratio, absolute and exclusive: tokens whose ratio is outside contribute nothing."""
    band_high: float | None = None
    """Upper bound of the ratio, likewise."""
    divergence_low: float | None = None
    """Largest divergence downwards (advantage < 0), as a probability difference or in nats."""
    divergence_high: float | None = None
    """Largest divergence upwards (advantage > 0), in the same unit."""
    weight: str | None = None
    """Behavior weight w = proximal/behavior: `none`, `truncate` min(w, high), `clip`, `zero` outside [low, high],
    `mask` (1 inside, 0 outside) or `self_normalize` (truncated, then divided by its mean)."""
    weight_level: str | None = None
    """Ratio of the behavior weight: that of the `token`, the `sequence`, its `geometric` mean or the turn
    (`segment`)."""
    weight_low: float | None = None
    """Lower bound of the behavior weight."""
    weight_high: float | None = None
    """Upper bound of the behavior weight."""
    opsm_delta: float | None = None
    """Sequences with A < 0 whose mean log(behavior/learner) is above this contribute nothing."""
    reject: str | None = None
    """Statistic of the edge E (B if a proximal policy is used) by which tokens or sequences are rejected."""
    reject_scope: str | None = None
    """The statistic of each token, or its mean, sum or maximum over the sequence."""
    reject_low: float | None = None
    """A token or sequence whose statistic is below this is rejected."""
    reject_high: float | None = None
    """A token or sequence whose statistic is above this is rejected."""
    reject_gate: str | None = None
    """Reject only where A < 0 (`negative`) or where the update would move the ratio further away from 1 (`outward`)."""
    veto: float | None = None
    """Sequences with any ratio below this (same edge as `reject`) are rejected as a whole."""
    max_age: int | None = None
    """Tokens older than this, in policy versions, are rejected."""
    denominator: str | None = None
    """`keep` counts rejected tokens, `renormalize` does not; another forward of each minibatch counts the kept ones."""
    centering: bool | None = None
    """Subtract the mean of the (weighted) score under the sampler from the gradient (score centering, 2609.20807),
    computed from the most likely tokens that the engine recorded: needs `engine.record_topk`. For losses of single
    tokens."""
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
    """Coefficient of the KL to the reference policy in the loss."""
    behavior_kl: float | None = None
    """Coefficient of (learner - behavior)^2 in log-probs, over all loss tokens."""
    entropy_coef: float | None = None
    """Coefficient of the entropy bonus: the entropy of the policy at each loss token, over what it is sampled from and
    with gradient, is summed like the losses and subtracted from the loss."""
    constant_length: float | None = None
    """Length by which the `constant` aggregation divides; usually `rollout.max_new_tokens`."""


KEYS: tuple[str, ...] = tuple(f.name for f in fields(LossConfig) if f.name != "preset")
