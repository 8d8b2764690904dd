from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config

from asyncrl.errors import ConfigError
from asyncrl.learner.model import scores
from asyncrl.learner.model.layout import Layout
from asyncrl.learner.model.scores import refuse_scores, score_bytes, too_many_scores
from asyncrl.schema import Config, DataConfig, LearnerConfig, ModelConfig, RolloutConfig

GPU = torch.device("cuda", 0)
SMALL = Qwen3Config(num_attention_heads=16, num_key_value_heads=8, num_hidden_layers=28)


def config(prompt: int, new: int, *, dtype: str = "float32", checkpointing: bool = False) -> Config:
    return Config(
        data=DataConfig(path="rows.jsonl", max_prompt_tokens=prompt),
        rollout=RolloutConfig(max_new_tokens=new),
        model=ModelConfig(path="m", dtype=dtype, activation_checkpointing=checkpointing),
        learner=LearnerConfig(max_tokens_per_microbatch=16384),
    )


def test_scores_are_kept_for_every_layer_unless_they_are_computed_again():
    one = 4 * 16 * 1024**2
    assert score_bytes(16, 8, 28, 1024, 3, recomputed=False) == 30 * 3 * one
    assert score_bytes(16, 8, 28, 1024, 3, recomputed=True) == 3 * 3 * one
    assert score_bytes(16, 16, 28, 1 << 17, 1, recomputed=False) == 0, "heads with keys of their own build none"


def test_float32_is_refused_above_a_length_with_the_numbers():
    memory = 80 * 10**9
    assert too_many_scores(config(128, 896), SMALL, memory) == ""
    problem = too_many_scores(config(1024, 7168), SMALL, memory)
    assert "16 heads that share 8 keys" in problem and "2 sequences of 8192 tokens would take 257.7 GB" in problem
    assert "this GPU has 80.0" in problem and "model.dtype=bfloat16" in problem and "checkpointing=true" in problem
    assert too_many_scores(config(1024, 7168, checkpointing=True), SMALL, memory) == ""
    longer = too_many_scores(config(8192, 8192, checkpointing=True), SMALL, memory)
    assert "1 sequences of 16384 tokens would take 51.5 GB" in longer and "checkpointing" not in longer
    shared = too_many_scores(config(8092, 100), SMALL, memory)
    assert "8 sequences of 8192 tokens" in shared, "siblings of a long prompt are as many rows as attention may hold"


@pytest.mark.parametrize(
    ("device", "dtype", "layout", "refused"),
    [
        (GPU, "float32", Layout.PACKED, True),
        (GPU, "bfloat16", Layout.PACKED, False),
        (GPU, "float32", Layout.ROWS, False),
        (torch.device("cpu"), "float32", Layout.PACKED, False),
    ],
)
def test_only_where_the_kernel_builds_them(
    device: torch.device, dtype: str, layout: Layout, refused: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scores, "memory_of", lambda *_: 24 * 10**9)
    given = config(16384, 16384, dtype=dtype)
    if not refused:
        refuse_scores(given, SMALL, device, layout)
        return
    with pytest.raises(ConfigError, match="scores"):
        refuse_scores(given, SMALL, device, layout)
