from __future__ import annotations

import asyncio
import copy
import math

import numpy as np
import pytest
import torch

from asyncrl.engines.hf.engine import TransformersEngine
from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.engines.lora import AdapterTable
from asyncrl.errors import ModelMismatchError
from asyncrl.weights.adapter import SCALING, peft_names, read_pairs, scaling_tensor
from tests.engines.models import make_model, plain_logprobs, prompt, request, weights_of
from tests.engines.running import asked_to_load, closing, make_held

RANK, ALPHA = 4, 12


def make_adapter(model: torch.nn.Module, seed: int, only: str = "") -> dict[str, torch.Tensor]:
    """For the linear layers of the blocks; of that name, if one is given."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {SCALING: scaling_tensor(RANK, ALPHA)}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and ".layers." in name and name.endswith(only):
            name_a, name_b = peft_names(name)
            tensors[name_a] = 0.2 * torch.randn(RANK, layer.in_features, generator=generator)
            tensors[name_b] = 0.2 * torch.randn(layer.out_features, RANK, generator=generator)
    return tensors


def merged(model: torch.nn.Module, adapter: dict[str, torch.Tensor]) -> torch.nn.Module:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, pair in read_pairs(adapter).items():
            model.get_parameter(f"{name}.weight").add_(ALPHA / RANK * pair.b @ pair.a)
    return model


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_adapters_change_in_flight_and_every_token_is_of_its_version(name: str):
    base = make_model(name)
    adapters = [make_adapter(base, seed) for seed in (1, 2)]
    engine, runner = make_held(base, steps=4, rows=8, adapters=True)
    ids = prompt(7)

    async def work():
        engine.load_weights(1, adapters[0])
        running = asyncio.ensure_future(engine.generate(request(ids, 3, new=40)))
        load = await asked_to_load(engine, runner, 2, adapters[1])
        runner.allow(math.inf)
        await load
        late = await engine.generate(request(ids, 1, new=8, seed=5))
        return await running, late

    group, (late,) = asyncio.run(closing(engine, work()))
    old, new = (merged(base, adapter) for adapter in adapters)
    for completion in group:
        before = completion.policy_versions == 1
        assert before.any() and (completion.policy_versions[~before] == 2).any()
        np.testing.assert_allclose(completion.logprobs[before], plain_logprobs(old, ids, completion)[before], atol=1e-4)
    assert (late.policy_versions == 2).all()
    np.testing.assert_allclose(late.logprobs, plain_logprobs(new, ids, late), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thousand_versions_do_not_drift(dtype: torch.dtype):
    model = make_model("qwen2", dtype=dtype)
    table, adapters = AdapterTable(model), [make_adapter(model, seed) for seed in range(4)]
    table.load(adapters[0])
    first = weights_of(model)
    for version in range(1, 1001):
        table.load(adapters[version % 4])
    assert all(torch.equal(tensor, first[name]) for name, tensor in weights_of(model).items())


def test_a_layer_whose_adapter_is_gone_serves_its_base_again():
    model = make_model("llama")
    base, table = weights_of(model), AdapterTable(model)
    table.load(make_adapter(model, 1))
    table.load(make_adapter(model, 2, only="v_proj"))
    for name, tensor in weights_of(model).items():
        assert torch.equal(tensor, base[name]) != name.endswith("v_proj.weight")


def test_weights_that_no_adapter_touches_are_those_of_the_base():
    model = make_model("qwen2")
    base, table = weights_of(model), AdapterTable(model)
    table.load(make_adapter(model, 1))
    changed = {name for name, tensor in weights_of(model).items() if not torch.equal(tensor, base[name])}
    assert changed == {f"{name}.weight" for name in read_pairs(make_adapter(model, 1))}


def broken(change: str) -> tuple[dict[str, torch.Tensor], str]:
    model = make_model("qwen2")
    tensors = make_adapter(model, 1)
    name_a, name_b = peft_names("model.layers.1.self_attn.k_proj")
    if change == "full weights":
        return weights_of(model), "either full weights or adapters"
    if change == "unknown":
        other_a, other_b = peft_names("model.layers.9.self_attn.k_proj")
        return tensors | {other_a: tensors[name_a], other_b: tensors[name_b]}, r"layers\.9.*no such linear layer"
    if change == "shape":
        return tensors | {name_b: torch.ones(5, RANK)}, r"k_proj' has lora_A \(4, 48\) and lora_B \(5, 4\)"
    return tensors | {name_a: torch.ones(RANK + 1, 48)}, r"lora_A \(5, 48\) and lora_B \(24, 4\)"


@pytest.mark.parametrize("change", ["full weights", "unknown", "shape", "rank"])
def test_an_adapter_that_does_not_fit_changes_nothing(change: str):
    tensors, message = broken(change)
    engine = TransformersEngine(ModelRunner(make_model("qwen2"), torch.device("cpu"), 4, adapters=True))
    engine.load_weights(1, make_adapter(make_model("qwen2"), 3))
    before = engine.score([prompt(9)])[0]
    with pytest.raises(ModelMismatchError, match=message):
        engine.load_weights(2, tensors)
    assert engine.policy_version == 1
    assert np.array_equal(engine.score([prompt(9)])[0], before)
    asyncio.run(engine.close())


def test_full_weights_are_what_an_engine_without_adapters_takes():
    engine = TransformersEngine(ModelRunner(make_model("qwen2"), torch.device("cpu"), 4))
    with pytest.raises(ModelMismatchError, match="unknown parameter"):
        engine.load_weights(1, make_adapter(make_model("qwen2"), 3))
    asyncio.run(engine.close())
