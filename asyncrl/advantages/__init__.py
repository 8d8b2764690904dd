"""Advantage estimators, as pure functions without gradients; see docs/losses.md.

Shapes: [N] one entry per sequence; [B, T] padded tokens, with `mask` true (or 1) for tokens that the policy sampled.
Values outside the mask are never read. float32 in, float32 out; float64 likewise.

A sample that failed or was rejected must not be in the arrays: it would change its siblings' baseline.
"""

from __future__ import annotations

from asyncrl.advantages.custom import AdvantageInputs
from asyncrl.advantages.group import BASELINES, STDS, gdpo, group_advantages, reward_components
from asyncrl.advantages.returns import reinforce_plus_plus, returns_to_go, token_rewards
from asyncrl.advantages.traces import gae, length_adaptive_lambda, retrace, segment_log_ratio, vtrace
from asyncrl.advantages.turns import turn_advantages
from asyncrl.advantages.whitening import WHITENINGS, masked_whiten, whitening_moments

__all__ = [
    "BASELINES",
    "STDS",
    "WHITENINGS",
    "AdvantageInputs",
    "gae",
    "gdpo",
    "group_advantages",
    "length_adaptive_lambda",
    "masked_whiten",
    "reinforce_plus_plus",
    "retrace",
    "returns_to_go",
    "reward_components",
    "segment_log_ratio",
    "token_rewards",
    "turn_advantages",
    "vtrace",
    "whitening_moments",
]
