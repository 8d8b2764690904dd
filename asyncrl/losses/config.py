"""The loss settings: torch-free, so that a config is composed and refused where no torch is loaded.

`LossConfig` is what Hydra fills, what `preset()` returns and what `policy_loss` takes. Every key but `preset` may be
None, which means the preset's own value; `resolve()` fills them in and refuses what the preset would ignore.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.losses.preset_row import COMMON_DEFAULTS, Preset
from asyncrl.losses.presets import PRESETS
from asyncrl.losses.rules import check_values, used_keys


@dataclass(kw_only=True, slots=True)
class LossConfig:
    """A preset and what to change in it. None keeps the preset's value; a key the preset does not use is refused."""

    preset: str = "dppo_tv"
    edge: str | None = None
    """Edge of the surrogate: `B` proximal/behavior, `U` learner/proximal, `E` learner/behavior. Where the preset
    leaves it open: `U` if proximal log-probs are given, else `E`."""
    level: str | None = None
    """Ratio of the `token`, the `sequence` product, its `geometric` mean, `gspo_token`, or the turn's (`segment`)
    geometric mean."""
    aggregation: str | None = None
    clip_low: float | None = None
    """Lower bound of the ratio is 1 - clip_low (for `gmpo`: of the log-ratio, -clip_low)."""
    clip_high: float | None = None
    dual_clip: float | None = None
    """Cap c > 1 on the loss of tokens with a negative advantage: at most -A c."""
    delta: float | None = None
    """Two-sided cap on the unclipped ratio; more than 1 + clip_high."""
    ratio_floor: float | None = None
    """Absolute bounds of a detached ratio."""
    ratio_cap: float | None = None
    band_low: float | None = None
    """Absolute, exclusive bounds: tokens whose ratio is outside give nothing."""
    band_high: float | None = None
    divergence_low: float | None = None
    """Largest divergence downwards (advantage < 0), as a probability difference or in nats."""
    divergence_high: float | None = None
    weight: str | None = None
    """Behavior weight w = proximal/behavior: `none`, `truncate` min(w, high), `clip`, `zero` outside [low, high],
    `mask` (1 inside, 0 outside) or `self_normalize` (truncated, then divided by its mean)."""
    weight_level: str | None = None
    weight_low: float | None = None
    weight_high: float | None = None
    opsm_delta: float | None = None
    """Sequences with A < 0 whose mean log(behavior/learner) is above this give nothing."""
    reject: str | None = None
    """Statistic of the edge E (B where a proximal policy is used) by which tokens or sequences are rejected."""
    reject_scope: str | None = None
    reject_low: float | None = None
    reject_high: float | None = None
    reject_gate: str | None = None
    """Reject only where A < 0 (`negative`) or where the update would move further away (`outward`)."""
    veto: float | None = None
    """Sequences with any ratio below this (same edge as `reject`) are rejected whole."""
    max_age: int | None = None
    """Tokens older than this, in policy versions, are rejected."""
    denominator: str | None = None
    """`keep` counts rejected tokens, `renormalize` does not (only where no global counts are given)."""
    tau_pos: float | None = None
    tau_neg: float | None = None
    beta: float | None = None
    """Strength of the regression to the behavior policy (`dro`)."""
    epsilon: float | None = None
    """Width of the quadratic trust region (`drpo`)."""
    m2_tau: float | None = None
    """Bound on the second moment of the log-ratio (the `m2po_*` presets)."""
    kl: str | None = None
    """Estimator of the KL to the reference policy; `+` takes the gradient of k2, `ratio_` multiplies by the ratio."""
    kl_coef: float | None = None
    behavior_kl: float | None = None
    """Coefficient of (learner - behavior)^2 in log-probs, over all loss tokens."""
    constant_length: float | None = None
    """Length by which the `constant` aggregation divides; usually `rollout.max_new_tokens`."""


KEYS: tuple[str, ...] = tuple(f.name for f in fields(LossConfig) if f.name != "preset")


def find_preset(name: str) -> Preset:
    """Raises ConfigError listing the valid names."""
    if name not in PRESETS:
        raise ConfigError(f"loss.preset must be one of {', '.join(PRESETS)}; got {name!r}")
    return PRESETS[name]


def preset(name: str, **overrides: Any) -> LossConfig:
    """The settings of a named loss with every key it uses filled in; `overrides` replace the preset's values.

    Raises:
        ConfigError: unknown preset (listing all), unknown key or one the preset does not use (listing those it
            uses), or a value out of range.
    """
    row = find_preset(name)
    unknown = sorted(set(overrides) - set(KEYS))
    if unknown:
        used = ", ".join(sorted(used_keys(row, resolve(LossConfig(preset=name)))))
        raise ConfigError(f"loss has no key {', '.join(unknown)}; preset {name!r} uses {used}")
    return resolve(LossConfig(preset=name, **overrides))


def resolve(config: LossConfig) -> LossConfig:
    """A copy with the preset's value in every key that is used; unused keys stay None. Checks everything.

    Raises:
        ConfigError: see `preset`.
    """
    row = find_preset(config.preset)
    given = {key: value for key in KEYS if (value := getattr(config, key)) is not None}
    merged = LossConfig(preset=row.name, **{**COMMON_DEFAULTS, **row.defaults, **given})
    used = used_keys(row, merged)
    ignored = sorted(set(given) - used)
    if ignored:
        raise ConfigError(
            f"preset {row.name!r} does not use {', '.join(f'loss.{key}={given[key]}' for key in ignored)}; "
            f"remove it. With these settings the preset uses {', '.join(sorted(used))}"
        )
    resolved = LossConfig(preset=row.name, **{key: getattr(merged, key) for key in used})
    check_values(row, resolved)
    return resolved


ESTIMATORS = {
    "vtrace": ("vtrace", "none"),
    "opo": ("group", "opo"),
    "remax": ("group", "greedy"),
    "reinforce_pp": ("reinforce_pp", "none"),
    "reinforce_pp_baseline": ("reinforce_pp", "mean"),
}
"""Presets that are an advantage more than a loss: `(advantage.estimator, advantage.baseline)` that makes them so."""


def scales_learning_rate(config: LossConfig) -> bool:
    """Whether the learning rate follows the effective sample size of the sequence ratios (VCPO)."""
    return config.preset == "vcpo"


def check_loss(config: LossConfig, updates_per_batch: int, averaged_anchor: bool = False) -> None:
    """Refuse a loss whose parts would do nothing, or count something twice, in the training loop.

    Args:
        config: the loss settings.
        updates_per_batch: optimizer steps per batch; with one, the proximal policy is the current one and U is 1.
        averaged_anchor: the proximal policy is a moving average of the weights (`learner.proximal_ema`).

    Raises:
        ConfigError: rule, value and way out; also everything `resolve` refuses.
    """
    row, config = find_preset(config.preset), resolve(config)
    if config.edge == "U" and config.weight == "none" and row.surrogate != "m2po_areal":
        raise ConfigError(
            f"loss.edge=U with loss.weight=none (preset {row.name!r}) drops the correction from the behavior to the "
            "proximal policy; use edge=E, or loss.weight=truncate"
        )
    if averaged_anchor and proximal_source(config, updates_per_batch) == "none":
        raise ConfigError(
            f"learner.proximal_ema makes a proximal policy, which loss.preset={row.name} does not use. Set "
            "learner.proximal_ema=0, or take a loss on the edge U such as loss=decoupled_ppo or loss=tis"
        )
    if updates_per_batch > 1 or averaged_anchor or config.edge != "U" or row.anchor == "loglinear":
        return
    changed = [key for key in TRUST_REGION if getattr(config, key) not in (None, row.defaults.get(key))]
    unbounded = config.weight not in ("none", "mask", "self_normalize") and config.weight_high == float("inf")
    if unbounded or row.anchor == "none" or changed:
        touched = f"loss.{changed[0]}={getattr(config, changed[0])}" if changed else f"the clip of preset {row.name!r}"
        raise ConfigError(
            f"with learner.updates_per_batch=1 the proximal policy is the current one, so learner/proximal is 1 and "
            f"{touched} on loss.edge=U does nothing; use updates_per_batch of 2 or more, or a trust region on the "
            "edge E (loss=dppo_tv, or loss=ppo), or a bounded behavior weight (loss=tis)"
        )


TRUST_REGION = ("clip_low", "clip_high", "dual_clip", "delta", "tau_pos", "tau_neg")


def proximal_source(config: LossConfig, updates_per_batch: int) -> str:
    """Where the learner gets `LossInputs.proximal_logprobs`.

    `none`: leave it None. `current`: `learner_logprobs.detach()`, which with one update per batch is what a separate
    forward pass would give. `recompute`: a forward pass before the first update on the batch.
    """
    row, config = find_preset(config.preset), resolve(config)
    weighted = config.weight != "none" and row.surrogate != "reinforce"
    if row.anchor == "loglinear" or not (row.anchor == "proximal" or config.edge in ("U", "B") or weighted):
        return "none"
    return "current" if updates_per_batch == 1 else "recompute"


def required_inputs(config: LossConfig) -> frozenset[str]:
    """Names of the optional `LossInputs` this loss cannot do without, proximal log-probs aside."""
    row, config = find_preset(config.preset), resolve(config)
    needs = {
        "ref_logprobs": bool(config.kl_coef),
        "group_ids": config.aggregation == "prompt_mean",
        "staleness": row.anchor == "loglinear" or config.max_age is not None,
    }
    return frozenset(name for name, needed in needs.items() if needed)
