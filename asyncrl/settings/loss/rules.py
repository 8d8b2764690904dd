"""Allowed values of loss settings, and which settings a loss reads."""

from __future__ import annotations

import math
import sys

from asyncrl.errors import ConfigError
from asyncrl.settings.loss.keys import LossConfig
from asyncrl.settings.loss.presets import Preset

LEVELS = ("token", "sequence", "geometric", "gspo_token", "segment")
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant", "prompt_mean", "token_sum")
WEIGHTS = ("none", "truncate", "clip", "zero", "mask", "self_normalize")
KL_KINDS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "ratio_k1", "ratio_k2", "ratio_k3", "ratio_abs")

CHOICES: dict[str, tuple[str, ...]] = {
    "edge": ("B", "U", "E"),
    "level": LEVELS,
    "aggregation": AGGREGATIONS,
    "weight": WEIGHTS,
    "weight_level": ("token", "sequence", "geometric", "segment"),
    "reject": ("none", "ratio", "k1", "k2", "k3", "binary_kl", "tv"),
    "reject_scope": ("token", "sequence_mean", "sequence_sum", "sequence_max"),
    "reject_gate": ("none", "negative", "outward"),
    "denominator": ("keep", "renormalize"),
    "kl": KL_KINDS,
}
"""Allowed values of the keys that take words."""

SURROGATE_KEYS: dict[str, tuple[str, ...]] = {
    "clip": ("edge", "level", "clip_low", "clip_high", "dual_clip", "delta", "sat_quantile"),
    "detached": ("edge", "level", "ratio_floor", "ratio_cap"),
    "capped": ("edge", "level", "ratio_cap"),
    "tapered": ("edge", "level", "ratio_floor", "ratio_cap"),
    "band": ("edge", "level", "band_low", "band_high"),
    "divergence_tv": ("edge", "divergence_low", "divergence_high", "ratio_cap"),
    "divergence_kl": ("edge", "divergence_low", "divergence_high", "ratio_cap"),
    "divergence_blind": ("edge", "divergence_low", "divergence_high"),
    "gmpo": ("edge", "clip_low", "clip_high"),
    "sapo": ("edge", "level", "tau_pos", "tau_neg"),
    "vespo": ("edge",),
    "drpo": ("edge", "epsilon"),
    "dro": ("edge", "beta"),
    "m2po_paper": ("edge", "m2_tau"),
    "m2po_release": ("edge", "m2_tau"),
    "m2po_areal": ("edge", "level", "clip_low", "clip_high", "dual_clip", "delta", "m2_tau"),
    "reinforce": (),
    "custom": ("function", "args", "edge"),
}
"""Keys that each surrogate reads. `reinforce` has no ratio, hence no edge."""

CENTERED = frozenset(
    {
        *("reinforce", "clip", "detached", "capped", "tapered", "band", "sapo", "drpo", "dro"),
        *("divergence_tv", "divergence_kl", "divergence_blind"),
    }
)
"""Surrogates whose gradient at a token depends only on that token, so that its mean under the sampler can be computed.
This does not hold at a level or a weight of whole sequences, or with a rejection of single tokens."""

GATED_BY_SIGN = frozenset({"clip", "divergence_tv", "divergence_kl"})
"""Surrogates that give no gradient to a token that is too far out in the direction of its advantage. With centering
they push it further out; not on the edge U, where one update per batch leaves nothing to stop."""

DETACHED_SURROGATES = frozenset({"detached", "tapered", "band", "divergence_tv", "divergence_kl"})
"""Surrogates whose ratio is a weight without gradient; only these make sense on the edge B."""


def used_keys(row: Preset, merged: LossConfig) -> set[str]:
    """Keys that affect the loss of `merged`, a config with its defaults filled in."""
    keys = {"aggregation", "weight", "opsm_delta", "reject", "veto", "max_age", "denominator"}
    keys |= {"kl", "kl_coef", "behavior_kl", "entropy_coef"} | set(SURROGATE_KEYS[row.surrogate])
    if row.surrogate in CENTERED:
        keys.add("centering")
    if merged.weight != "none":
        keys |= {"weight_level", "weight_low", "weight_high"}
    if merged.reject != "none":
        keys |= {"reject_scope", "reject_low", "reject_high", "reject_gate"}
    if merged.aggregation == "constant":
        keys.add("constant_length")
    return keys


def check_values(row: Preset, config: LossConfig) -> None:
    """Check words and ranges of a resolved config. Raises ConfigError with the rule, the value and the way out."""
    for key, choices in CHOICES.items():
        value = getattr(config, key)
        if value is not None and value not in choices:
            raise ConfigError(f"loss.{key} must be one of {', '.join(choices)}; got {value!r}")
    for key, low, high, rule in RANGES:
        value = getattr(config, key)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"loss.{key} must be {rule}; got {value}")
    for low_key, high_key in (("ratio_floor", "ratio_cap"), ("band_low", "band_high"), ("weight_low", "weight_high")):
        low, high = getattr(config, low_key), getattr(config, high_key)
        if low is not None and high is not None and low > high:
            raise ConfigError(f"loss.{low_key} must not be above loss.{high_key}; got {low} and {high}")
    if config.delta is not None and config.clip_high is not None and config.delta <= 1 + config.clip_high:
        raise ConfigError(
            f"loss.delta must be above 1 + loss.clip_high = {1 + config.clip_high}, or the clip would never act; "
            f"got {config.delta}"
        )
    check_own(row, config)
    check_centering(row, config)
    check_edges(row, config)


def check_edges(row: Preset, config: LossConfig) -> None:
    """Refuse combinations whose parts cancel, count twice or have no gradient."""
    if config.edge == "B" and row.surrogate not in DETACHED_SURROGATES:
        raise ConfigError(
            f"loss.edge=B has no gradient, and preset {row.name!r} differentiates its ratio; use edge=U or edge=E"
        )
    if config.edge == "E" and config.weight not in (None, "none", "mask"):
        raise ConfigError(
            f"loss.weight={config.weight} on top of loss.edge=E counts proximal/behavior twice (E already contains "
            "it); use weight=none, or edge=U with proximal log-probs"
        )
    if config.kl not in (None, "k3") and config.kl_coef == 0:
        raise ConfigError(
            f"loss.kl={config.kl} without a coefficient does nothing; set loss.kl_coef, or remove loss.kl"
        )


def check_own(row: Preset, config: LossConfig) -> None:
    """Check that a function is named; whether it works is tried before a run (`asyncrl.losses.custom`)."""
    if row.surrogate != "custom":
        return
    if not config.function or ":" not in config.function:
        raise ConfigError(
            f"loss=custom needs loss.function=file.py:name or package.module:name; got {config.function or 'none'}"
        )


def check_centering(row: Preset, config: LossConfig) -> None:
    """Refuse centering unless a token's weight follows from its two probabilities, for all tokens of the vocabulary."""
    if not config.centering:
        return
    reasons = {
        f"loss.level={config.level} weighs whole sequences": config.level not in (None, "token"),
        f"loss.weight_level={config.weight_level} weighs whole sequences": config.weight_level not in (None, "token"),
        "loss.weight=self_normalize divides by a mean over the batch": config.weight == "self_normalize",
        f"loss.sat_quantile={config.sat_quantile} clips by a token's rank in the batch": bool(config.sat_quantile),
        f"loss.reject={config.reject} of single tokens is a weight that centering does not include": config.reject
        not in (None, "none")
        and config.reject_scope == "token",
        f"preset {row.name!r} makes a proximal policy of its own": row.anchor == "loglinear",
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(
                f"loss.centering=true takes the mean of a token's weighted score out of the gradient, and {reason}. "
                "Use a loss of single tokens (loss=dis, cispo, tis, icepop, no_correction), or set "
                "loss.centering=false"
            )


def _positive(key: str) -> tuple[str, float, float, str]:
    return key, math.ulp(0.0), math.inf, "above 0"


LARGEST = sys.float_info.max
RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("clip_low", 0.0, math.inf, "at least 0 (the lower bound is 1 - clip_low)"),
    ("clip_high", 0.0, math.inf, "at least 0 (the upper bound is 1 + clip_high)"),
    ("dual_clip", 1.0 + 1e-9, math.inf, "above 1"),
    ("sat_quantile", 0.0, math.nextafter(1.0, 0.0), "at least 0 (off) and below 1"),
    ("ratio_floor", 0.0, math.inf, "at least 0"),
    _positive("ratio_cap"),
    ("band_low", 0.0, math.inf, "at least 0"),
    _positive("band_high"),
    ("divergence_low", 0.0, math.inf, "at least 0"),
    ("divergence_high", 0.0, math.inf, "at least 0"),
    ("weight_low", 0.0, math.inf, "at least 0"),
    _positive("weight_high"),
    ("veto", 0.0, math.inf, "at least 0"),
    ("max_age", 0, math.inf, "at least 0"),
    _positive("tau_pos"),
    _positive("tau_neg"),
    ("beta", 0.0, LARGEST, "at least 0, and finite"),
    _positive("epsilon"),
    ("m2_tau", 0.0, math.inf, "at least 0"),
    ("kl_coef", 0.0, LARGEST, "at least 0, and finite"),
    ("behavior_kl", 0.0, LARGEST, "at least 0, and finite"),
    ("entropy_coef", 0.0, LARGEST, "at least 0, and finite"),
    _positive("constant_length"),
    *((key, -math.inf, math.inf, "a number") for key in ("opsm_delta", "reject_low", "reject_high")),
)
"""(key, smallest, largest, rule in words)."""
