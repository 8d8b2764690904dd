"""The table of named losses. For formulas, papers and purposes see the table in docs/losses.md.

A row names a surrogate (the function of that name in `asyncrl/losses/surrogates.py`) and the values that differ from
`COMMON_DEFAULTS`. A new algorithm made of existing parts is one more row here and in docs/losses.md, one YAML in
configs/loss/ and one reference in tests/losses/references.py; a test names whichever is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """One named loss."""

    name: str
    surrogate: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    anchor: str = "none"
    """`none`: works without proximal log-probs; `proximal`: needs them; `loglinear`: makes its own from staleness."""
    batch_statistic: bool = False
    """Whether it keeps or clips depending on all tokens of a batch, so that it needs a first pass over the batch."""


COMMON_DEFAULTS: dict[str, Any] = {
    "level": "token",
    "aggregation": "token_mean",
    "weight": "none",
    "weight_level": "token",
    "weight_low": 0.0,
    "weight_high": math.inf,
    "reject": "none",
    "reject_scope": "token",
    "reject_low": -math.inf,
    "reject_high": math.inf,
    "reject_gate": "none",
    "denominator": "keep",
    "centering": False,
    "sat_quantile": 0.0,
    "kl": "k3",
    "kl_coef": 0.0,
    "behavior_kl": 0.0,
    "entropy_coef": 0.0,
    "constant_length": 1024.0,
}
"""Values of keys that a preset's row does not set."""

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
DECOUPLED = {"edge": "U", **CLIP}
BEHAVIOR = {"edge": "E"}
GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}

PRESETS: dict[str, Preset] = {
    row.name: row
    for row in (
        Preset("ppo", "clip", CLIP),
        Preset("dual_clip", "clip", {**CLIP, "dual_clip": 3.0}),
        Preset("grpo", "clip", {**CLIP, "aggregation": "seq_mean_token_mean"}),
        Preset("dr_grpo", "clip", {**CLIP, "aggregation": "constant"}),
        Preset("dapo", "clip", {"clip_low": 0.2, "clip_high": 0.28}),
        Preset("rloo", "clip", {**CLIP, "level": "sequence", "aggregation": "seq_mean_token_mean"}),
        Preset("reinforce", "reinforce"),
        Preset("no_correction", "reinforce"),
        Preset("reinforce_pp", "clip", CLIP),
        Preset("reinforce_pp_baseline", "clip", CLIP),
        Preset("remax", "reinforce"),
        Preset("opo", "reinforce"),
        Preset("gspo", "clip", {**GSPO, "level": "geometric", "aggregation": "seq_mean_token_mean"}),
        Preset("gspo_token", "clip", {**GSPO, "level": "gspo_token", "aggregation": "seq_mean_token_mean"}),
        Preset("luspo", "clip", {**GSPO, "level": "geometric", "aggregation": "seq_mean_token_sum"}),
        Preset("cispo", "detached", {"ratio_floor": 0.0, "ratio_cap": 5.0}),
        Preset("scale_rl", "detached", {"ratio_floor": 0.0, "ratio_cap": 5.0, "aggregation": "prompt_mean"}),
        Preset("gmpo", "gmpo", {"clip_low": 0.4, "clip_high": 0.4, "aggregation": "seq_mean_token_mean"}),
        Preset("sapo", "sapo", {"tau_pos": 1.0, "tau_neg": 1.05, "aggregation": "seq_mean_token_mean"}),
        Preset("vespo", "vespo", BEHAVIOR),
        # For stale data: behavior weights, rejection, and trust regions around the behavior policy.
        Preset("decoupled_ppo", "clip", {**DECOUPLED, "weight": "zero"}, anchor="proximal"),
        Preset("a3po", "clip", {**DECOUPLED, "weight": "zero"}, anchor="loglinear"),
        Preset("tis", "clip", {**DECOUPLED, "weight": "truncate", "weight_high": 2.0}, anchor="proximal"),
        Preset(
            "seq_tis",
            "clip",
            {**DECOUPLED, "weight": "truncate", "weight_level": "sequence", "weight_high": 2.0},
            anchor="proximal",
        ),
        Preset(
            "mis",
            "clip",
            {**DECOUPLED, "weight": "zero", "weight_level": "sequence", "weight_high": 3.0},
            anchor="proximal",
        ),
        Preset(
            "icepop", "clip", {**DECOUPLED, "weight": "zero", "weight_low": 0.5, "weight_high": 5.0}, anchor="proximal"
        ),
        Preset("dis", "band", {**BEHAVIOR, "band_low": 0.7, "band_high": 6.0}),
        Preset(
            "geo_rs",
            "clip",
            {
                **DECOUPLED,
                "weight": "mask",
                "weight_level": "geometric",
                "weight_low": 0.999,
                "weight_high": 1.001,
                "denominator": "renormalize",
            },
            anchor="proximal",
        ),
        Preset("opsm", "clip", {**CLIP, "opsm_delta": 0.5, "aggregation": "seq_mean_token_mean"}),
        Preset("m2po_paper", "m2po_paper", {**BEHAVIOR, "m2_tau": 0.04}, batch_statistic=True),
        Preset("m2po_release", "m2po_release", {**BEHAVIOR, "m2_tau": 0.04}, batch_statistic=True),
        Preset(
            "m2po_areal",
            "m2po_areal",
            {**DECOUPLED, "m2_tau": 0.04, "denominator": "renormalize"},
            anchor="proximal",
            batch_statistic=True,
        ),
        Preset("topr", "tapered", {**BEHAVIOR, "ratio_floor": 0.0, "ratio_cap": 1.0}),
        Preset("aipo", "capped", {**BEHAVIOR, "ratio_cap": 4.0}),
        Preset(
            "ipo", "divergence_blind", {**BEHAVIOR, "divergence_low": 0.1, "divergence_high": 0.1, "behavior_kl": 1e-3}
        ),
        Preset(
            "dppo_tv", "divergence_tv", {**BEHAVIOR, "divergence_low": 0.2, "divergence_high": 0.2, "ratio_cap": 20.0}
        ),
        Preset(
            "dppo_kl", "divergence_kl", {**BEHAVIOR, "divergence_low": 0.05, "divergence_high": 0.05, "ratio_cap": 20.0}
        ),
        Preset("drpo", "drpo", {**BEHAVIOR, "epsilon": 12.5}),
        Preset("dro", "dro", {**BEHAVIOR, "beta": 0.1}),
        Preset("vtrace", "reinforce"),
        Preset("vcpo", "reinforce", {"weight": "truncate", "weight_level": "sequence", "weight_high": 8.0}),
    )
}
"""Every named loss."""

CUSTOM = Preset("custom", "custom")
"""The user-defined loss. It is not in the table, because it cannot be checked here."""
