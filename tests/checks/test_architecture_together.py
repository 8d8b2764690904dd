"""Checks of `config.json` for tensor, sequence and expert parallelism."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.checks.architecture import EXPERT_COUNTS, foreign_maths, not_apart, not_in_blocks, not_shared, not_together

QWEN = {"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_family_that_is_proven_is_cut_where_all_is_even(ranks: int):
    assert not_together(QWEN, ranks) == ""


@pytest.mark.parametrize(
    ("change", "ranks", "said"),
    [
        ({"model_type": "gpt2"}, 2, "qwen3, smollm3, starcoder2, and this is gpt2"),
        ({}, 8, "4 key-value heads cannot be split over learner.tensor_parallel=8 ranks. Set it to one of 1, 2, 4"),
        ({"num_key_value_heads": 3}, 2, "Set it to one of 1"),
        ({}, 3, "8 attention heads cannot be split"),
        ({"intermediate_size": 97}, 2, "97 numbers within its feed-forward layer"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_its_number_and_a_way_out(change: dict, ranks: int, said: str):
    problem = not_together(QWEN | change, ranks)
    assert said in problem and "Set " in problem
    assert not_together({"model_type": "llava", "text_config": QWEN | change}, ranks) == problem


@pytest.mark.parametrize(
    ("change", "ranks", "said"),
    [
        ({"hidden_size": 128}, 1, ""),
        ({"hidden_size": 512, "intermediate_size": 1024}, 4, ""),
        ({"intermediate_size": 97}, 4, ""),  # rows that have no blocks
        ({"intermediate_size": 64}, 2, ""),
        ({"intermediate_size": 64}, 4, "cuts rows of 64 into parts of 16, which is not a multiple of 32"),
        ({"hidden_size": 128}, 8, "cuts rows of 128 into parts of 16"),
        ({"hidden_size": 128, "head_dim": 16}, 8, "cuts rows of 128 into parts of 16"),
        ({"hidden_size": 128, "head_dim": 32}, 8, "cuts rows of 96 into parts of 12"),
    ],
)
def test_moments_in_8_bits_are_cut_between_blocks_or_refused(change: dict, ranks: int, said: str):
    """It was found once all ranks had loaded the model."""
    problem = not_in_blocks(QWEN | change, ranks)
    assert said in problem and bool(problem) == bool(said)
    assert not_in_blocks({"model_type": "llava", "text_config": QWEN | change}, ranks) == problem


@pytest.mark.parametrize(("ranks", "together"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2)])
def test_sequences_are_shared_where_heads_are_even_or_repeat(ranks: int, together: int):
    assert not_shared(QWEN, ranks, together) == ""


@pytest.mark.parametrize(
    ("change", "ranks", "together", "said"),
    [
        ({"model_type": "mamba"}, 2, 1, "is only tested for apertus, cohere2"),
        ({}, 3, 1, "must divide its 8 attention heads"),
        ({}, 8, 2, "its 4 attention heads, and divide its 2 key-value heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, 1, "Set it to one of 1, 2, 4, 12"),
        (
            {"model_type": "gpt2", "num_attention_heads": None, "n_head": 3, "num_key_value_heads": None},
            2,
            1,
            "its 3 attent",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, 2, 1, "(longrope) depends on the longest sequence"),
    ],
)
def test_sequences_that_cannot_be_shared_are_refused_with_the_arithmetic(
    change: dict, ranks: int, together: int, said: str
):
    problem = not_shared(QWEN | change, ranks, together)
    assert said in problem and "Set " in problem


MIXTURE = {"model_type": "qwen3_moe", "num_experts": 12, "num_experts_per_tok": 2}


def test_experts_are_spread_where_they_are_even_and_a_model_without_any_has_none_to_spread():
    assert (
        not_apart(MIXTURE, 4) == not_apart(QWEN, 4) == not_apart({"model_type": "gpt_oss", "num_experts": 8}, 1) == ""
    )


@pytest.mark.parametrize(
    ("change", "ranks", "said"),
    [
        ({"model_type": "gpt_oss"}, 2, "qwen3_moe, and this is gpt_oss"),
        ({}, 8, "must divide its 12 experts. Set it to one of 1, 2, 3, 4, 6, 12"),
        ({"num_experts": None, "n_routed_experts": 9}, 2, "must divide its 9 experts"),
    ],
)
def test_experts_that_cannot_be_spread_are_refused_with_the_arithmetic(change: dict, ranks: int, said: str):
    problem = not_apart(MIXTURE | change, ranks)
    assert said in problem and "Set " in problem
    assert not_apart({"model_type": "llava", "text_config": MIXTURE | change}, ranks) == problem


ODD = st.sampled_from([None, "", "x", 0, -3, 1, 2.5, True, [], [1], {}, {"rope_type": 3}])
NAMES = st.sampled_from(
    [
        *QWEN,
        *EXPERT_COUNTS,
        "text_config",
        "rope_scaling",
        "rope_parameters",
        "final_logit_softcapping",
        "num_experts_per_tok",
    ]
)


@given(odd=st.dictionaries(NAMES, ODD, max_size=4), ranks=st.integers(1, 8), together=st.integers(1, 4))
def test_odd_values_in_a_config_are_left_to_whoever_loads_the_model(odd: dict[str, Any], ranks: int, together: int):
    """Here each function says a sentence or nothing; a traceback would hide what transformers says of the file."""
    settings = QWEN | odd
    if not not_together(settings, together):
        assert isinstance(not_shared(settings, ranks, together), str)
    assert isinstance(foreign_maths(settings), str) and isinstance(not_apart(settings, ranks), str)
