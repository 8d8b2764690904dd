"""Tests of `engine.exact`: engine and learner compute the same bits, whatever else is in their batches."""

from __future__ import annotations

import asyncio
import copy
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.hf.engine import TransformersEngine
from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.errors import ConfigError, WeightsError
from asyncrl.exact import kernels
from asyncrl.exact.arithmetic import bits_for, exp, on_grid, to_units
from asyncrl.exact.model import make_exact
from asyncrl.learner.model.layout import Layout, use_layout
from asyncrl.learner.model.policy import PolicyModel, compute_exactly
from asyncrl.learner.publishing.canary import canary_of
from asyncrl.learner.publishing.probes import probes_of
from asyncrl.types import TOPK_LOGPROBS, SamplingParams
from asyncrl.weights.canary import Proof
from tests.engines.models import CONFIGS, SHAPE, make_model, prompt, request, weights_of
from tests.engines.running import HeldRunner, asked_to_load, closing
from tests.exact_pack import Sibling, likeliest_by_learner, scored_by_learner

CPU = torch.device("cpu")
TEMPERATURE = 0.7
LENGTHS = (1, 2, 17, 5, 70, 3)


def policy_of(model: torch.nn.Module, exact: bool = True) -> PolicyModel:
    policy = PolicyModel(copy.deepcopy(model))  # pyright: ignore[reportArgumentType]
    use_layout(policy, Layout.PACKED)
    if exact:
        compute_exactly(policy, CPU)
    return policy


def exact_engine(model: torch.nn.Module, rows: int = 40) -> TransformersEngine:
    return TransformersEngine(ModelRunner(copy.deepcopy(model), CPU, rows, exact=True), recompute=True)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


# ---- the arithmetic ----


def test_sums_of_products_are_exact_in_whatever_order_they_are_added():
    # Values over 12 orders of magnitude: of float32 sums the order would show at once.
    spread = torch.from_numpy(np.random.default_rng(1).uniform(-6, 6, 3000).astype(np.float32))
    x, w = numbers(3000, seed=2) * spread.exp(), numbers(3000, seed=3) * spread.flip(0).exp()
    bits = bits_for(3000)
    a, b = on_grid(x, bits), on_grid(w, bits)
    whole = math.fsum((a * b).tolist())  # correctly rounded: of an exact sum that is the sum
    for order in (torch.arange(3000), torch.randperm(3000), x.abs().argsort()):
        total = 0.0
        for term in (a * b)[order].tolist():
            total += term
        assert total == whole == float(a[order] @ b[order])
    assert not float(x @ w) == float(x.flip(0) @ w.flip(0)) == whole


def test_rounding_to_the_grid_is_that_of_numpy_and_moves_no_value_by_more_than_half_a_unit():
    x = numbers(5, 64) * torch.tensor([1e-30, 1e-3, 1.0, 1e5, 1e30])[:, None]
    bits = 21
    unit = 2.0 ** (np.floor(np.log2(x.abs().amax(1, keepdim=True).numpy().astype(np.float64))) + 1 - bits)
    assert np.array_equal(on_grid(x, bits).numpy(), np.round(x.numpy().astype(np.float64) / unit) * unit)
    assert torch.equal(on_grid(torch.zeros(2, 8), bits), torch.zeros(2, 8, dtype=torch.float64))
    assert on_grid(torch.tensor([[1.0, math.nan]]), bits).isnan().all()
    shares = torch.rand(100, dtype=torch.float64)
    assert (to_units(shares, 2.0**-26) - shares).abs().max() <= 2.0**-27


def test_the_exponential_is_right_to_ten_digits_and_stays_finite():
    x = torch.linspace(-690, 690, 9999, dtype=torch.float64)
    assert ((exp(x) - x.exp()) / x.exp()).abs().max() < 1e-9
    assert exp(torch.tensor([-math.inf], dtype=torch.float64)) < 1e-300


@pytest.mark.parametrize("keys", [1, 9, 130])
def test_kernels_are_those_of_a_float64_reference_to_float32_rounding(keys):
    x, weight, bias = numbers(7, 48), numbers(30, 48, seed=1), numbers(30, seed=2)
    wide = x.double()
    found = kernels.linear(x, kernels.rounded_weight(weight), bias)
    torch.testing.assert_close(found.double(), wide @ weight.double().T + bias, atol=1e-5, rtol=0)
    norm = weight[0] * wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(kernels.rms_norm(x, weight[0], 1e-6).double(), norm, atol=3e-6, rtol=3e-6)
    torch.testing.assert_close(kernels.silu(x).double(), functional.silu(wide), atol=1e-6, rtol=1e-6)
    logits = 20 * x
    torch.testing.assert_close(kernels.logsumexp(logits).double(), logits.double().logsumexp(-1), atol=1e-5, rtol=0)
    query, key = numbers(2, 4, keys, 16), numbers(2, 2, keys, 16, seed=1)
    value = numbers(2, 2, keys, 24, seed=2) * torch.logspace(-3, 3, keys)[:, None]  # keys of unlike sizes
    value[:, :, keys // 2] = 0
    expected = functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=True, scale=0.3, enable_gqa=True
    )
    apart = (kernels.attention(query, key, value, 0.3, None) - expected).abs() / expected.abs().amax(-1, keepdim=True)
    assert apart.nan_to_num().max() < 3e-6


def test_what_stands_beside_a_row_changes_none_of_its_bits():
    x, weight = numbers(37, 96), kernels.rounded_weight(numbers(130, 96, seed=1))
    query, key, value = numbers(3, 4, 50, 16), numbers(3, 2, 50, 16, seed=1), numbers(3, 2, 50, 16, seed=2)
    together, whole = kernels.linear(x, weight, None), kernels.attention(query, key, value, 0.25, None)
    for row in (0, 17, 36):
        assert torch.equal(kernels.linear(x[row : row + 1], weight, None)[0], together[row])
        assert torch.equal(kernels.silu(x[row, 3:8]), kernels.silu(x)[row, 3:8])
        assert torch.equal(kernels.logsumexp(x[row]), kernels.logsumexp(x)[row])
        assert torch.equal(kernels.rms_norm(x[row], x[0], 1e-6), kernels.rms_norm(x, x[0], 1e-6)[row])
    for place in (0, 7, 49):  # a step of decoding over a padded cache, a shorter prompt, other batch-mates
        seen = (torch.arange(50) <= place)[None, None, None].expand(3, 1, 1, 50)
        step = kernels.attention(query[:, :, place : place + 1], key, value, 0.25, seen)
        assert torch.equal(step[:, :, 0], whole[:, :, place])
        asked, *known = (part[1:2, :, : place + 1] for part in (query, key, value))
        assert torch.equal(kernels.attention(asked, known[0], known[1], 0.25, None), whole[1:2, :, : place + 1])


def test_attention_in_pieces_is_attention_at_once(monkeypatch):
    query, key, value = numbers(2, 4, 40, 8), numbers(2, 2, 40, 8, seed=1), numbers(2, 2, 40, 8, seed=2)
    band = (torch.ones(40, 40).tril() - torch.ones(40, 40).tril(-5)).bool()[None, None]
    whole = [kernels.attention(query, key, value, 0.3, mask) for mask in (None, band)]
    monkeypatch.setattr(kernels, "SCORES", 900)
    for mask, expected in zip((None, band), whole, strict=True):
        assert torch.equal(kernels.attention(query, key, value, 0.3, mask), expected)


BITS = """
import sys
from tests.test_exact import bits_of_everything
sys.stdout.write(bits_of_everything())
"""


def bits_of_everything() -> str:
    """A digest over the log-probs that a learner computes for what an engine drew; the weights are the caller's."""
    rng = np.random.default_rng(0)
    model = make_model("qwen3")
    for parameter in model.parameters():  # torch draws otherwise with other instructions
        parameter.data = torch.from_numpy(0.2 * rng.standard_normal(parameter.shape).astype(np.float32))
    engine = exact_engine(model)
    drawn = asyncio.run(closing(engine, engine.generate(request(prompt(40), 3, new=20, seed=5))))
    siblings = [Sibling(prompt(40), completion) for completion in drawn]
    found = scored_by_learner(policy_of(model), siblings, 1.0)
    assert np.array_equal(np.concatenate(found), np.concatenate([each.completion.logprobs for each in siblings]))
    return b"".join(values.tobytes() for values in found).hex()


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.timeout(900)
def test_threads_and_vector_units_change_no_bit():
    told = []
    for threads, instructions in (("1", "default"), ("2", "avx2")):
        environment = os.environ | {"OMP_NUM_THREADS": threads, "ATEN_CPU_CAPABILITY": instructions}
        done = subprocess.run(
            [sys.executable, "-c", BITS], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
    assert len(told[0]) > 100 and told[0] == told[1]


# ---- engine and learner ----


@pytest.mark.parametrize("name", CONFIGS)
def test_the_learner_finds_every_recorded_logprob_to_the_bit_however_it_packs(name):
    model = make_model(name)
    engine = exact_engine(model)

    async def work():
        asked = (engine.generate(request(prompt(p), 3, new=14, seed=p, temperature=TEMPERATURE)) for p in LENGTHS)
        return await asyncio.gather(*asked)

    groups = asyncio.run(closing(engine, work()))
    siblings = [Sibling(prompt(p), each) for p, group in zip(LENGTHS, groups, strict=True) for each in group]
    policy = policy_of(model)
    packs = [siblings, siblings[::-1], siblings[3:5], *([each] for each in siblings[::4])]
    for pack in packs:  # prompts shared by three, by two, by none; rows of other lengths beside each other
        for sibling, found in zip(pack, scored_by_learner(policy, pack, TEMPERATURE), strict=True):
            assert np.array_equal(found, sibling.completion.logprobs)
    ordinary = scored_by_learner(policy_of(model, exact=False), siblings, TEMPERATURE)
    apart = [np.abs(f - each.completion.logprobs).max() for f, each in zip(ordinary, siblings, strict=True)]
    assert 0 < max(apart) < 1e-3  # the same function; without the kernels it is not the same to the bit


def test_gradients_are_those_of_a_float64_reference_to_rounding():
    model = make_model("qwen2")
    siblings = [Sibling.drawn(prompt(length), length, seed=length) for length in (3, 9)]
    exact, wide = policy_of(model), copy.deepcopy(model).double()
    torch.cat(scored_by_learner(exact, siblings, 1.0, tensors=True)).sum().backward()
    for sibling in siblings:  # one after the other, by transformers alone
        drawn = torch.from_numpy(sibling.completion.token_ids).long()
        ids = torch.cat([torch.from_numpy(sibling.prompt).long(), drawn])
        logprobs = wide(input_ids=ids[None]).logits[0, len(sibling.prompt) - 1 : -1].log_softmax(-1)
        logprobs.gather(1, drawn[:, None]).sum().backward()
    for ours, reference in zip(exact.parameters(), wide.parameters(), strict=True):
        assert ours.grad is not None and reference.grad is not None
        assert float((ours.grad - reference.grad).abs().max()) <= 1e-4 * float(reference.grad.abs().max())


def test_a_request_gets_the_same_tokens_and_bits_alone_and_among_others():
    model = make_model("llama")

    def answers(*others: int):
        engine = exact_engine(model)

        async def work():
            rest = [engine.generate(request(prompt(p), 4, new=15, seed=p)) for p in others]
            return (await asyncio.gather(engine.generate(request(prompt(9), 2, new=15, seed=1)), *rest))[0]

        return asyncio.run(closing(engine, work()))

    for alone, among in zip(answers(), answers(70, 2, 33), strict=True):
        assert np.array_equal(alone.token_ids, among.token_ids) and np.array_equal(alone.logprobs, among.logprobs)


def test_tokens_after_an_update_are_those_of_the_new_weights_to_the_bit():
    model, other = make_model("qwen2"), make_model("qwen2", seed=1)
    runner = HeldRunner(copy.deepcopy(model), CPU, 40, exact=True)
    engine = TransformersEngine(runner, recompute=True)
    runner.allow(3)
    ids = prompt(5)

    async def work():
        await asyncio.to_thread(engine.load_weights, 3, weights_of(model))
        running = [asyncio.ensure_future(engine.generate(request(p, 3, new=16))) for p in (ids, prompt(50))]
        load = await asked_to_load(engine, runner, 4, weights_of(other))
        runner.allow(math.inf)
        await load
        return await asyncio.gather(*running)

    groups = asyncio.run(closing(engine, work()))
    siblings = [Sibling(p, each) for p, group in zip((ids, prompt(50)), groups, strict=True) for each in group]
    by_version = {
        version: scored_by_learner(policy_of(weights), siblings, 1.0) for version, weights in ((3, model), (4, other))
    }
    for place, sibling in enumerate(siblings):
        versions = sibling.completion.policy_versions
        assert set(versions.tolist()) == {3, 4}
        for version, found in by_version.items():
            of = versions == version
            assert np.array_equal(found[place][of], sibling.completion.logprobs[of])


def test_truncated_tokens_and_the_likeliest_are_recorded_as_the_learner_has_them():
    model = make_model("qwen3")
    engine = exact_engine(model)
    sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=20, top_p=0.8, record_topk=5)
    asked = GenerateRequest(request_id="r", prompt_ids=prompt(12), n=2, sampling=sampling, seed=3)
    siblings = [Sibling(prompt(12), each) for each in asyncio.run(closing(engine, engine.generate(asked)))]
    found = scored_by_learner(policy_of(model), siblings, TEMPERATURE)
    likeliest = likeliest_by_learner(policy_of(model), siblings, TEMPERATURE)
    for place, sibling in enumerate(siblings):
        assert np.array_equal(found[place], sibling.completion.logprobs)
        recorded = sibling.completion.recorded[TOPK_LOGPROBS]
        inside = np.isfinite(recorded)
        assert np.array_equal(likeliest[place][inside], recorded[inside])


def test_the_canary_of_an_exact_engine_allows_no_difference():
    model = make_model("qwen2")
    engine, policy = exact_engine(model), policy_of(model)
    probes = probes_of(policy, 0)

    async def work():
        return engine.score(probes)

    served = asyncio.run(closing(engine, work()))
    canary = canary_of(policy, probes, CPU, "float32", "float32")
    proof = Proof(score=lambda _: served, engine_dtype="float32", exact=True)
    assert proof.prove(1, canary).max == 0
    served[2][7] = np.nextafter(served[2][7], np.float32(0))
    with pytest.raises(
        WeightsError, match=r"Probe 2, token 8: .* engine.exact=true, learner and engine must both be exact"
    ):
        proof.prove(1, canary)
    assert Proof(score=lambda _: served, engine_dtype="float32").prove(1, canary).max > 0


def test_models_that_compute_something_else_are_refused_by_what_it_is():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9))
    with pytest.raises(ConfigError, match=r"its model type is 'gpt2', but only llama.*Set engine.exact=false"):
        make_exact(gpt2, CPU)
    with pytest.raises(ConfigError, match="it has GELU"):
        make_exact(Qwen2ForCausalLM(Qwen2Config(**SHAPE, hidden_act="gelu")), CPU)
    scaled = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ConfigError, match="of the kind 'dynamic'"):
        make_exact(Qwen2ForCausalLM(Qwen2Config(**SHAPE, rope_parameters=scaled)), CPU)
    with pytest.raises(ConfigError, match="it is on cuda"):
        make_exact(make_model("qwen2"), torch.device("cuda"))  # pyright: ignore[reportArgumentType]
