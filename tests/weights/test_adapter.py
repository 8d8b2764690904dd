from __future__ import annotations

import pytest
import torch

from asyncrl.errors import ModelMismatchError
from asyncrl.weights.adapter import SCALING, peft_names, read_pairs, read_scaling, scaling_tensor
from asyncrl.weights.manifest import Manifest
from tests.weights.versions import buckets_of, version_of


def adapter(rank: int = 3, alpha: int = 7) -> dict[str, torch.Tensor]:
    tensors = {SCALING: scaling_tensor(rank, alpha)}
    for i in range(2):
        name_a, name_b = peft_names(f"model.layers.{i}.mlp.up_proj")
        tensors |= {name_a: torch.randn(rank, 5), name_b: torch.randn(8, rank)}
    return tensors


def test_the_scaling_survives_a_bfloat16_wire_exactly():
    version = version_of(list(adapter(rank=13, alpha=501).items()), dtype=torch.bfloat16)
    manifest = Manifest.from_wire(version.manifest.to_wire())
    arrived = manifest.views(buckets_of(version))
    assert read_scaling(arrived) == (13, 501)
    pairs = read_pairs(arrived)
    assert list(pairs) == ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    assert {pair.a.dtype for pair in pairs.values()} == {torch.bfloat16}


def test_what_an_adapter_adds_is_the_scaled_product():
    tensors = adapter()
    pair = read_pairs(tensors)["model.layers.1.mlp.up_proj"]
    a, b = (tensors[name] for name in peft_names("model.layers.1.mlp.up_proj"))
    weight = torch.randn(8, 5)
    torch.testing.assert_close(pair.added_to(weight, 7 / 3), weight + 7 / 3 * b @ a)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(SCALING), "has no adapter"),
        (
            lambda tensors: tensors.pop(peft_names("model.layers.0.mlp.up_proj")[1]),
            r"only lora_A\.weight of the adapter of .*up_proj'",
        ),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(1)}), r"'model\.norm\.weight' belongs to no"),
    ],
)
def test_an_update_that_is_no_whole_adapter_is_refused_by_name(change, message):
    tensors = adapter()
    change(tensors)
    with pytest.raises(ModelMismatchError, match=message):
        read_pairs(tensors)
