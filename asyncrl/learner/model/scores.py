"""Float32 on a GPU: estimates the memory that attention with grouped keys takes, and refuses a run before it runs out.

The kernels that do not build scores support keys shared by several heads only in half precision. In float32 torch falls
back to one that builds [heads, L, L] per sequence and keeps it for the backward.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from asyncrl.checks.dtypes import dtype_on, recomputed_on
from asyncrl.errors import ConfigError
from asyncrl.learner.memory_plan import ROOM
from asyncrl.learner.model.packed import Layout
from asyncrl.learner.parallel.place import memory_of
from asyncrl.schema import Config

PASSING = 2
"""Number of copies of one layer's scores during its computation, besides what is kept: before and after the softmax."""


def score_bytes(heads: int, kv_heads: int, layers: int, longest: int, rows: int, *, recomputed: bool) -> int:
    """Bytes of scores in the attention of one micro-batch in float32 on a GPU.

    Args:
        longest: number of tokens of each of its `rows` sequences.
        recomputed: whether activations are recomputed, not kept (`model.activation_checkpointing`).
    """
    if kv_heads == heads:
        return 0
    return 4 * heads * longest**2 * rows * ((1 if recomputed else layers) + PASSING)


def refuse_scores(config: Config, hf: PretrainedConfig, device: torch.device, layout: Layout) -> None:
    """Raises ConfigError if the scores would take more than half of the GPU's memory."""
    if device.type != "cuda" or dtype_on(config.model.dtype, device.type) != "float32" or layout is not Layout.PACKED:
        return
    problem = too_many_scores(config, hf, memory_of(device, 1))
    if problem:
        raise ConfigError(problem)


def too_many_scores(config: Config, hf: PretrainedConfig, memory: int) -> str:
    """Why float32 does not work on a GPU with `memory` bytes; empty if it does."""
    text = hf.get_text_config(decoder=True)
    heads, layers = getattr(text, "num_attention_heads", 0), text.num_hidden_layers
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    prompt, new = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    longest, tokens = prompt + new, config.learner.max_tokens_per_microbatch
    rows = max(1, min(config.learner.attention_budget // longest, (tokens - prompt) // new))
    recomputed = recomputed_on(config.model.activation_checkpointing, "cuda")
    needed = score_bytes(heads, kv_heads, layers, longest, rows, recomputed=recomputed)
    if needed <= ROOM * memory:
        return ""
    other = "" if recomputed else ", or model.activation_checkpointing=true"
    return (
        f"model.dtype=float32 on a GPU: with {heads} heads that share {kv_heads} keys attention builds {heads} x L x L "
        f"scores. A micro-batch of {rows} sequences of {longest} tokens would take {needed / 1e9:.1f} GB for them, "
        f"and this GPU has {memory / 1e9:.1f}. Set model.dtype=bfloat16, which builds none{other}, or lower "
        "learner.max_attention_per_microbatch, data.max_prompt_tokens or "
        "rollout.max_new_tokens"
    )
