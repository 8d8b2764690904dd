"""Tokens, versions and weights of the transformers engine while weights arrive."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
import torch

from asyncrl.errors import WeightsError
from asyncrl.types import NO_VERSION
from asyncrl.weights.base import StagedTensors
from tests.engines.models import (
    make_model,
    plain_logprobs,
    prompt,
    request,
    weights_of,
)
from tests.engines.running import asked_to_load, closing, make_engine, make_held, until

CPU = torch.device("cpu")


def test_an_update_in_flight_changes_versions_in_the_middle_of_running_sequences():
    model, other = make_model("qwen2"), make_model("qwen2", seed=1)
    engine, runner = make_held(model, steps=3)
    ids = prompt(5)

    async def work():
        await asyncio.to_thread(engine.load_weights, 3, weights_of(model))
        running = asyncio.ensure_future(engine.generate(request(ids, 4, new=60)))
        load = await asked_to_load(engine, runner, 4, weights_of(other))
        runner.allow(math.inf)
        await load
        assert engine.policy_version == 4
        return await running, await engine.generate(request(ids, 1))

    group, (after,) = asyncio.run(closing(engine, work()))
    for completion in group:
        assert set(completion.policy_versions.tolist()) == {3, 4}
        assert (np.diff(completion.policy_versions) >= 0).all()
        old = completion.policy_versions == 3
        expected = plain_logprobs(model, ids, completion)
        np.testing.assert_allclose(completion.logprobs[old], expected[old], atol=1e-4)
        assert np.abs(completion.logprobs[~old] - expected[~old]).max() > 0.1
    np.testing.assert_allclose(after.logprobs, plain_logprobs(other, ids, after), atol=1e-4)


def test_an_update_to_identical_weights_changes_only_the_version():
    model = make_model("qwen3")
    engine, runner = make_held(model, steps=3)
    ids = prompt(5)

    async def work():
        running = asyncio.ensure_future(engine.generate(request(ids, 2, new=60)))
        load = await asked_to_load(engine, runner, 0, weights_of(model))
        runner.allow(math.inf)
        await load
        return await running

    for completion in asyncio.run(closing(engine, work())):
        assert set(completion.policy_versions.tolist()) == {NO_VERSION, 0}
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, ids, completion), atol=1e-4)


def test_a_load_that_waits_too_long_for_a_decode_step_is_withdrawn():
    model = make_model("qwen2")
    engine, runner = make_held(model, steps=2, load_timeout_s=0.0)

    async def work():
        running = asyncio.ensure_future(engine.generate(request(prompt(4), 64, new=20)))
        await until(lambda: runner.held)
        with pytest.raises(WeightsError, match="the engine thread hangs"):
            await asyncio.to_thread(engine.load_weights, 9, weights_of(model))
        assert engine.policy_version == NO_VERSION
        runner.allow(math.inf)
        await running
        assert engine.policy_version == NO_VERSION

    asyncio.run(closing(engine, work()))


def test_a_refused_load_changes_no_weight():
    model, other = make_model("qwen2"), make_model("qwen2", seed=1)
    engine = make_engine(model)
    good = weights_of(other)
    name = "model.layers.1.mlp.up_proj.weight"
    broken = {
        "unknown parameter 'nope'": {**good, "nope": torch.zeros(1)},
        "is missing": {key: value for key, value in good.items() if key != name},
        "has shape": {**good, name: good[name][:-1]},
        "does not cast": {**good, name: good[name].to(torch.int64)},
    }

    async def work():
        for message, tensors in broken.items():
            with pytest.raises(WeightsError, match=message):
                await asyncio.to_thread(engine.load_weights, 5, tensors)
        return (await engine.generate(request(prompt(6))))[0]

    completion = asyncio.run(closing(engine, work()))
    assert set(completion.policy_versions.tolist()) == {NO_VERSION}
    np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, prompt(6), completion), atol=1e-4)


def test_a_tied_parameter_may_come_under_either_name_and_in_the_wire_dtype():
    other = make_model("qwen2", seed=1)
    engine = make_engine(make_model("qwen2"))
    tensors = {key: value.to(torch.bfloat16) for key, value in weights_of(other).items()}
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    other.load_state_dict({key: value.to(torch.bfloat16) for key, value in other.state_dict().items()})

    async def work():
        await asyncio.to_thread(engine.load_weights, 1, tensors)
        return (await engine.generate(request(prompt(6))))[0]

    completion = asyncio.run(closing(engine, work()))
    np.testing.assert_allclose(completion.logprobs, plain_logprobs(other, prompt(6), completion), atol=1e-4)


def test_staged_tensors_take_the_place_of_the_parameters_and_others_are_copied():
    models = [make_model("qwen2", seed=seed) for seed in range(3)]
    engine = make_engine(models[0])
    staged = [StagedTensors(weights_of(model)) for model in models]
    half = StagedTensors({name: tensor.bfloat16() for name, tensor in staged[2].items()})

    async def work():
        scored = []
        for version, tensors in enumerate((staged[1], half, staged[2], weights_of(models[1]))):
            running = asyncio.ensure_future(engine.generate(request(prompt(4), 2, new=20)))
            await asyncio.to_thread(engine.load_weights, version, tensors)
            scored.append((await asyncio.to_thread(engine.score, [prompt(9)]))[0])
            await running
        return scored

    first, rounded, second, copied = asyncio.run(closing(engine, work()))
    assert [tensors.kept for tensors in (staged[1], half, staged[2])] == [True, False, True]
    np.testing.assert_array_equal(first, copied)
    np.testing.assert_allclose(rounded, second, atol=0.5)
    assert not np.allclose(first, second, atol=0.5)
    engine_memory = {p.data_ptr() for p in engine._runner.model.parameters()}
    assert engine_memory == {tensor.data_ptr() for tensor in staged[2].values()}, "the copy went into what it kept"
