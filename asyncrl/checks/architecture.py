"""What a model's `config.json` alone says against training it: without torch, hence before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OF_LOGITS = (
    *("final_logit_softcapping", "logits_soft_cap", "logit_scale", "logits_scaling"),
    *("output_multiplier_scale", "lm_head_multiplier"),
)
"""Fields of models whose logits are more than `lm_head(hidden)`: the learner would compute other log-probs."""
OF_SCORES = ("attn_logit_softcapping",)
"""Fields of models that change attention scores in a way that the packed attention does not know."""
SINKS = ("gpt_oss", "mimo_v2_flash")
"""Model types with a learned sink in every attention."""


def foreign_maths(settings: Mapping[str, Any]) -> str:
    """What the model computes and the learner does not; empty where nothing is known.

    Args:
        settings: of `config.json`. What it does not tell is found when the model is loaded (`learner/layout.py`).
    """
    text = settings.get("text_config") or settings
    kind = text.get("model_type") or settings.get("model_type")
    logits = [name for name in OF_LOGITS if text.get(name) not in (None, 1.0)]
    if logits:
        return (
            f"{kind} applies {', '.join(logits)} to its logits, which the learner does not; use a model whose logits "
            "are lm_head(hidden)"
        )
    scores = [name for name in OF_SCORES if text.get(name) is not None]
    scores += ["attention sinks"] if kind in SINKS else []
    if scores:
        return (
            f"{kind} has {', '.join(scores)}, which packed attention does not compute; use a plain causal decoder "
            "(Llama, Qwen2, Qwen3, Mistral)"
        )
    return ""
