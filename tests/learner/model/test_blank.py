"""Models made by their config alone, as every rank but the reading ones does."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GPTJConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from asyncrl.learner.model.attention import PACKED_ATTENTION
from asyncrl.learner.model.layout import blank

GPTJ = GPTJConfig(n_layer=1, n_head=2, n_embd=16, rotary_dim=4, vocab_size=32, n_positions=32)
QWEN = Qwen2Config(
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    hidden_size=16,
    intermediate_size=16,
    vocab_size=32,
)


@pytest.mark.parametrize(
    ("kind", "settings", "attention"),
    [
        (AutoModelForCausalLM, GPTJ, "eager"),
        (AutoModelForCausalLM, QWEN, PACKED_ATTENTION),
        (AutoModelForTokenClassification, QWEN, PACKED_ATTENTION),
    ],
)
def test_a_model_that_accepts_only_its_own_attention_is_made_with_that(
    kind: type, settings: PreTrainedConfig, attention: str
) -> None:
    model = blank(kind, settings, dtype=torch.float32)
    assert model.config._attn_implementation == attention
    assert settings._attn_implementation != PACKED_ATTENTION, "the caller's config is as it was"
