"""The table of layers that ranks which compute together split, against the plans of transformers."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

from asyncrl.checks.architecture import BY_COLUMNS, BY_ROWS, COMPUTED_TOGETHER, FUSED, SPLIT_LAYERS
from asyncrl.learner.memory_plan import on_one_of

THEIRS = {
    **dict.fromkeys(("colwise", "colwise_gather_output"), (BY_ROWS, FUSED)),
    **dict.fromkeys(("rowwise", "rowwise_split_input"), (BY_COLUMNS,)),
}
"""Their style, named after the part of the output that a rank has -> ours."""


def plan_of(kind: str) -> dict[str, str]:
    return {name.rpartition(".")[2]: style for name, style in (CONFIG_MAPPING[kind].base_model_tp_plan or {}).items()}


@pytest.mark.parametrize("kind", COMPUTED_TOGETHER)
def test_every_layer_that_transformers_splits_is_in_the_table(kind: str):
    layers = {name: style for name, style in plan_of(kind).items() if not name.endswith("norm")}
    assert layers, "transformers has a plan of this family"
    assert all(SPLIT_LAYERS.get(name) in THEIRS[style] for name, style in layers.items()), layers


def test_the_table_has_no_other_layers():
    assert SPLIT_LAYERS.keys() <= {name for kind in COMPUTED_TOGETHER for name in plan_of(kind)}


def test_the_memory_plan_splits_the_bias_of_fused_layers_until_they_are_gathered():
    bias = {"model.layers.0.self_attn.qkv_proj.bias": (12,), "model.layers.0.self_attn.o_proj.bias": (8,)}
    assert list(on_one_of(bias, 2).values()) == [(6,), (8,)]
    assert list(on_one_of(bias, 2, computing=True).values()) == [(12,), (8,)]
