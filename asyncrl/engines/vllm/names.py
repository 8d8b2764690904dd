"""What both ends of a server know of the plugin. Imports no vllm."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

BACKEND = "asyncrl"
EXTENSION = "asyncrl.engines.vllm.plugin.WorkerExtension"
PROTOCOL = 3
"""Of the calls of `plugin.WorkerExtension`, of what they are given and what they answer. 2: fingerprints of leaves. 3:
parts of tensors."""
SHAPE_KEYS = (
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "tie_word_embeddings", "num_experts", "rms_norm_eps"),
)


def shape_of(config: Any) -> dict[str, Any]:
    """Of a Hugging Face config, what tells models apart. Plain values."""
    return {key: getattr(config, key, None) for key in SHAPE_KEYS}


async def load_staged(call: Callable[[str, tuple[()]], Awaitable[list[Any]]]) -> str:
    """Why a worker could not load what it has staged; empty where all did. Twice at most: after a failed load the model
    is mixed, and only a whole one mends it."""
    errors: list[str] = []
    for _ in range(2):
        errors = [error for error in await call("asyncrl_load", ()) if error]
        if not errors:
            return ""
    return errors[0]
