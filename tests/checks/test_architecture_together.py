"""What `config.json` says against computing the layers of a model on several ranks together."""

from __future__ import annotations

import pytest

from asyncrl.checks.architecture import not_together

QWEN = {"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_family_that_is_proven_is_cut_where_all_is_even(ranks: int):
    assert not_together(QWEN, ranks) == ""


@pytest.mark.parametrize(
    ("change", "ranks", "said"),
    [
        ({"model_type": "gpt2"}, 2, "is proven for llama, mistral, qwen2, qwen3, and this is gpt2"),
        ({}, 8, "4 key-value heads cannot be cut over learner.tensor_parallel=8"),
        ({}, 3, "8 attention heads cannot be cut"),
        ({"intermediate_size": 97}, 2, "97 numbers between the halves"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_its_number_and_a_way_out(change: dict, ranks: int, said: str):
    problem = not_together(QWEN | change, ranks)
    assert said in problem and "Set " in problem
    assert not_together({"model_type": "llava", "text_config": QWEN | change}, ranks) == problem
