"""What both ends of a server know of the plugin. Imports no vllm."""

from __future__ import annotations

from typing import Any

BACKEND = "asyncrl"
EXTENSION = "asyncrl.engines.vllm.plugin.WorkerExtension"
PROTOCOL = 2
"""Of the calls of `plugin.WorkerExtension`, of what they are given and what they answer. 2: fingerprints of leaves."""
SHAPE_KEYS = (
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "tie_word_embeddings", "num_experts", "rms_norm_eps"),
)


def shape_of(config: Any) -> dict[str, Any]:
    """Of a Hugging Face config, what tells models apart. Plain values."""
    return {key: getattr(config, key, None) for key in SHAPE_KEYS}
