"""The row type of the table of named losses (`presets.py`). Torch-free.

In the formulas: mu, prox, cur, ref are log-probs; B = exp(prox-mu), U = exp(cur-prox), E = exp(cur-mu); r is the ratio
on the row's edge; sg[.] stops the gradient; A is the advantage; C(r) = max(-A r, -A clip(r, 1-clip_low, 1+clip_high)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One named loss and what a user needs to choose it."""

    name: str
    surrogate: str
    paper: str
    formula: str
    """Loss of one token, before aggregation."""
    users: str
    when: str
    advantage: str = "group mean"
    """The estimator its authors pair it with (`asyncrl.advantages`)."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    anchor: str = "none"
    """`none`: works without proximal log-probs; `proximal`: needs them; `loglinear`: makes its own from staleness."""
    batch_statistic: bool = False
    """What it keeps or clips depends on all tokens of a batch: a first pass over its micro-batches finds it."""


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
"""What a preset does where its row says nothing."""


CLIP = {"clip_low": 0.2, "clip_high": 0.2}
DECOUPLED = {"edge": "U", **CLIP}
BEHAVIOR = {"edge": "E"}
