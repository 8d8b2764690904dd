"""The built-in engine on a pretended GPU: everything that it computes is there, and it is what a CPU computes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig

from asyncrl.engines.hf.engine import TransformersEngine
from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.types import ROUTED_EXPERTS
from asyncrl.weights.adapter import SCALING, peft_names, scaling_tensor
from tests.engines.models import CONFIGS, SHAPE, make_model, prompt, request, weights_of
from tests.pretended_gpu import pretended_gpus

MOE = Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, tie_word_embeddings=False)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "half precision": {"dtype": torch.bfloat16},
    "a wide head": {"dtype": torch.bfloat16, "fp32_head": True},
    "the likeliest tokens": {"sampling": {"record_topk": 3}},
    "truncated": {"sampling": {"top_p": 0.8, "top_k": 5}},
    "greedy": {"sampling": {"temperature": 0.0}},
    "adapters": {"adapters": True},
    "recomputed keys": {"recompute": True},
    "recorded experts": {"model": "moe", "sampling": {"record_routing": True}},
}


def adapter(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    made = {SCALING: scaling_tensor(2, 4)}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.endswith("q_proj"):
            a, b = peft_names(name)
            made |= {a: torch.randn(2, layer.in_features), b: torch.randn(layer.out_features, 2)}
    return made


def made(device: str, case: dict[str, Any]) -> tuple[list[Any], list[np.ndarray]]:
    """Completions that span an update, of prompts that are prefilled together, and the scores of two sequences."""
    left = dict(case)
    name, dtype = left.pop("model", "llama"), left.pop("dtype", torch.float32)
    sampling, recompute = left.pop("sampling", {}), left.pop("recompute", False)
    model = make_model(name, dtype=dtype)
    update = adapter(model) if left.get("adapters") else {k: 1.1 * v for k, v in weights_of(model).items()}
    engine = TransformersEngine(ModelRunner(model, torch.device(device), 8, **left), recompute=recompute)

    async def work() -> tuple[list[Any], list[np.ndarray]]:
        asked = [request(prompt(5 + i, i), n=2, new=9, seed=i) for i in range(3)]
        asked = [replace(each, sampling=replace(each.sampling, **sampling)) for each in asked]
        await asyncio.gather(*map(engine.generate, asked))
        await asyncio.to_thread(engine.load_weights, 1, update)
        after = await asyncio.gather(*map(engine.generate, asked))
        scored = await asyncio.to_thread(engine.score, [prompt(12), prompt(7)])
        await engine.close()
        return [completion for group in after for completion in group], scored

    return asyncio.run(work())


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
@pytest.mark.parametrize("case", CASES)
def test_what_the_engine_computes_on_a_gpu_stays_there_and_is_the_same(case: str, device: str, monkeypatch):
    monkeypatch.setitem(CONFIGS, "moe", MOE)
    with pretended_gpus(2):
        torch.manual_seed(0)
        ours, scores = made(device, CASES[case])
    torch.manual_seed(0)
    theirs, wanted = made("cpu", CASES[case])
    for our, their in zip(ours, theirs, strict=True):
        assert our.token_ids.tolist() == their.token_ids.tolist()
        np.testing.assert_allclose(our.logprobs, their.logprobs, atol=1e-4)
        assert our.recorded.keys() == their.recorded.keys()
        assert case != "recorded experts" or len(our.recorded[ROUTED_EXPERTS])
    np.testing.assert_allclose(np.concatenate(scores), np.concatenate(wanted), atol=1e-4)
