"""Constants and helpers of the plugin that both ends of a server use. Imports no vllm."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

BACKEND = "asyncrl"
EXTENSION = "asyncrl.engines.vllm.plugin.WorkerExtension"
PROTOCOL = 4
"""Version of the calls of `plugin.WorkerExtension`, their arguments and answers. 2: fingerprints of leaves. 3: parts of
tensors."""
SHAPE_KEYS = (
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "tie_word_embeddings", "num_experts", "rms_norm_eps"),
)


def shape_of(config: Any) -> dict[str, Any]:
    """Return the values of a Hugging Face config that tell models apart. Plain values."""
    return {key: getattr(config, key, None) for key in SHAPE_KEYS}


async def load_staged(call: Callable[[str, tuple[()]], Awaitable[list[Any]]]) -> str:
    """Load the staged weights in all workers; returns the error of one that could not, or an empty string. Tries twice:
    after a failed load the model is mixed, and only a complete load repairs it."""
    errors: list[str] = []
    for _ in range(2):
        errors = [error for error in await call("asyncrl_load", ()) if error]
        if not errors:
            return ""
    return errors[0]
