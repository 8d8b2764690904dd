"""A model small enough for benchmarks that are about everything else."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config


def tiny_model(**changes: Any) -> PreTrainedModel:
    """149 k parameters: hidden 64, 2 layers, 2 heads of 32, vocabulary 264; but for `changes`."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = Qwen2Config(
        vocab_size=264,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        **(sizes | changes),
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
