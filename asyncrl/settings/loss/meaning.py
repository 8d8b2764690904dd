"""What the settings of a loss mean: the preset's values filled in, what is refused, and what the loss needs.

`LossConfig` is what Hydra fills, what `preset()` returns and what `policy_loss` takes. Every key but
`preset` may be None, which means the preset's own value; `resolve()` fills these in and refuses settings that the
preset would ignore.
"""

from __future__ import annotations

from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.settings.loss.keys import KEYS, LossConfig
from asyncrl.settings.loss.presets import COMMON_DEFAULTS, CUSTOM, PRESETS, Preset
from asyncrl.settings.loss.rules import GATED_BY_SIGN, check_values, used_keys


def find_preset(name: str) -> Preset:
    """The preset of this name. Raises ConfigError listing the valid names."""
    if name == CUSTOM.name:
        return CUSTOM
    if name not in PRESETS:
        raise ConfigError(f"loss.preset must be one of {', '.join(PRESETS)}, {CUSTOM.name}; got {name!r}")
    return PRESETS[name]


def preset(name: str, **overrides: Any) -> LossConfig:
    """The settings of a named loss with every key that it uses filled in; `overrides` replace the preset's values.

    Raises:
        ConfigError: unknown preset (listing all), unknown key or one that the preset does not use (listing those that
            it uses), or a value out of range.
    """
    row = find_preset(name)
    unknown = sorted(set(overrides) - set(KEYS))
    if unknown:
        used = ", ".join(sorted(used_keys(row, resolve(LossConfig(preset=name)))))
        raise ConfigError(f"loss has no key {', '.join(unknown)}; preset {name!r} uses {used}")
    return resolve(LossConfig(preset=name, **overrides))


def resolve(config: LossConfig) -> LossConfig:
    """A copy with the preset's value in every key that is used; unused keys stay None. Validates everything.

    Raises:
        ConfigError: see `preset`.
    """
    row = find_preset(config.preset)
    given = {key: value for key in KEYS if (value := getattr(config, key)) is not None and value not in ("", {})}
    merged = LossConfig(preset=row.name, **{**COMMON_DEFAULTS, **row.defaults, **given})
    used = used_keys(row, merged)
    ignored = sorted(set(given) - used)
    if "function" in ignored:
        raise ConfigError(
            f"loss.function={given['function']} takes the place of a named loss, and preset {row.name!r} is one. Write "
            f"loss=custom loss.function={given['function']}"
        )
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
"""Presets that are defined by their advantage estimator: the `(advantage.estimator, advantage.baseline)` they need."""


def scales_learning_rate(config: LossConfig) -> bool:
    """Whether the learning rate is scaled by the effective sample size of the sequence ratios (VCPO)."""
    return config.preset == "vcpo"


def check_loss(config: LossConfig, updates_per_batch: int, averaged_anchor: bool = False) -> None:
    """Refuse a loss whose parts would do nothing, or count something twice, in the training loop.

    Args:
        config: the loss settings.
        updates_per_batch: optimizer steps per batch; with one, the proximal policy is the current one and U is 1.
        averaged_anchor: the proximal policy is a moving average of the weights (`learner.proximal_ema`).

    Raises:
        ConfigError: names the rule, the value and the way out; also for everything that `resolve` refuses.
    """
    row, config = find_preset(config.preset), resolve(config)
    if config.centering and (averaged_anchor or updates_per_batch > 1) and proximal_source(config, 2) != "none":
        raise ConfigError(
            f"loss.centering=true needs the proximal log-probs of tokens that were not sampled, which {row.name} "
            "has only where the proximal policy is the current one. Set learner.updates_per_batch=1 and learner."
            "proximal_ema=0, or use a loss on the edge E (loss=dis, cispo, no_correction)"
        )
    if config.centering and row.surrogate in GATED_BY_SIGN and config.edge != "U":
        raise ConfigError(
            f"loss.centering=true with loss={row.name}, which stops tokens beyond the trust region depending on the "
            "sign of their advantage. Subtracting the mean of the other tokens would push those tokens further out, "
            "and the run would not learn (docs/losses.md). Use a loss that treats both signs alike (dis, cispo, tis, "
            "icepop, no_correction), or set loss.centering=false"
        )
    if row is CUSTOM and (not averaged_anchor or config.edge == "U"):
        return  # the function itself decides on its ratios
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
    off = {"sat_quantile": 0.0}
    changed = [key for key in TRUST_REGION if getattr(config, key) not in (None, row.defaults.get(key, off.get(key)))]
    unbounded = config.weight not in ("none", "mask", "self_normalize") and config.weight_high == float("inf")
    if unbounded or row.anchor == "none" or changed:
        touched = f"loss.{changed[0]}={getattr(config, changed[0])}" if changed else f"the clip of preset {row.name!r}"
        raise ConfigError(
            f"with learner.updates_per_batch=1 the proximal policy is the current one, so learner/proximal is 1 and "
            f"{touched} on loss.edge=U does nothing; use updates_per_batch of 2 or more, or a trust region on the "
            "edge E (loss=dppo_tv, or loss=ppo), or a bounded behavior weight (loss=tis)"
        )


TRUST_REGION = ("clip_low", "clip_high", "dual_clip", "delta", "sat_quantile", "tau_pos", "tau_neg")


def proximal_source(config: LossConfig, updates_per_batch: int) -> str:
    """Source of the learner's `LossInputs.proximal_logprobs`.

    `none`: leave it None. `current`: `learner_logprobs.detach()`, which with one update per batch is what a separate
    forward pass would give. `recompute`: a forward pass before the first update on the batch.
    """
    row, config = find_preset(config.preset), resolve(config)
    weighted = config.weight != "none" and row.surrogate != "reinforce"
    if row.anchor == "loglinear" or not (row.anchor == "proximal" or config.edge in ("U", "B") or weighted):
        return "none"
    return "current" if updates_per_batch == 1 else "recompute"


def needs_first_pass(config: LossConfig) -> bool:
    """Whether the loss depends on all tokens of the optimizer batch, so that `policy_loss` needs `kept`."""
    return looks_at_all(find_preset(config.preset), resolve(config))


def looks_at_all(row: Preset, resolved: LossConfig) -> bool:
    """See `needs_first_pass`."""
    whole = row.batch_statistic or resolved.weight == "self_normalize"
    return whole or resolved.denominator == "renormalize" or bool(resolved.sat_quantile)


def required_inputs(config: LossConfig) -> frozenset[str]:
    """Names of the optional `LossInputs` that this loss needs, except proximal log-probs."""
    row, config = find_preset(config.preset), resolve(config)
    needs = {
        "ref_logprobs": bool(config.kl_coef),
        "group_ids": config.aggregation == "prompt_mean",
        "staleness": row.anchor == "loglinear" or config.max_age is not None,
        "topk": bool(config.centering),
    }
    return frozenset(name for name, needed in needs.items() if needed)
