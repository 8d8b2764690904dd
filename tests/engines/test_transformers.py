from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from asyncrl.engines.runner import ModelRunner
from asyncrl.engines.transformers import TransformersEngine
from asyncrl.errors import ConfigError, GenerationError, WeightsError
from asyncrl.types import NO_VERSION
from asyncrl.weights.base import StagedTensors
from tests.engines.models import (
    VOCABULARY,
    make_model,
    plain_logprobs,
    prompt,
    request,
    weights_of,
    write_own_sampling,
)

CPU = torch.device("cpu")


def make_engine(model: torch.nn.Module, rows: int = 64, **kwargs) -> TransformersEngine:
    return TransformersEngine(ModelRunner(copy.deepcopy(model), CPU, rows), **kwargs)


async def closing(engine: TransformersEngine, work):
    try:
        return await asyncio.wait_for(work, 60)
    finally:
        await engine.close()


async def until(condition) -> None:
    async with asyncio.timeout(50):
        while not condition():
            await asyncio.sleep(0.0005)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_recorded_logprobs_are_those_of_a_plain_forward_for_prompts_joining_mid_flight(name):
    model = make_model(name)
    engine = make_engine(model, rows=14)

    async def work():
        first = [asyncio.ensure_future(engine.generate(request(prompt(p), 3, new=30, seed=p))) for p in (1, 2, 17)]
        await until(lambda: engine.stats()["decode_steps"] >= 3)
        late = [asyncio.ensure_future(engine.generate(request(prompt(p), 4, new=9, seed=p))) for p in (5, 70, 3)]
        return await asyncio.gather(*first, *late)

    groups = asyncio.run(closing(engine, work()))
    for length, group in zip((1, 2, 17, 5, 70, 3), groups, strict=True):
        for completion in group:
            expected = plain_logprobs(model, prompt(length), completion)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_sampling_settings_that_come_with_a_model_are_not_followed(tmp_path):
    make_model("qwen2").save_pretrained(tmp_path)
    asked = request(prompt(9), 4, new=24)

    def answers():
        engine = TransformersEngine(ModelRunner.from_pretrained(str(tmp_path), torch.float32, CPU, 8))
        return asyncio.run(closing(engine, engine.generate(asked)))

    plain = answers()
    write_own_sampling(tmp_path)
    for with_it, without in zip(answers(), plain, strict=True):
        assert np.array_equal(with_it.token_ids, without.token_ids)
        assert np.array_equal(with_it.logprobs, without.logprobs)
        np.testing.assert_allclose(with_it.logprobs, plain_logprobs(make_model("qwen2"), prompt(9), with_it), atol=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_recorded_logprobs_include_the_temperature(temperature):
    model = make_model("qwen2")
    engine = make_engine(model)
    ids = prompt(6)
    (completion,) = asyncio.run(closing(engine, engine.generate(request(ids, temperature=temperature))))
    np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, ids, completion, temperature), atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_greedy_is_generate_of_transformers_with_logprobs_at_temperature_one(name):
    model = make_model(name)
    engine = make_engine(model)
    prompts = [prompt(4), prompt(11), prompt(2)]

    async def work():
        sampled = engine.generate(request(prompt(9), 4, new=20))
        greedy = [engine.generate(request(ids, temperature=0.0, new=20, stop=(2,))) for ids in prompts]
        return (await asyncio.gather(sampled, *greedy))[1:]

    for ids, (completion,) in zip(prompts, asyncio.run(closing(engine, work())), strict=True):
        tensor = torch.from_numpy(ids.astype(np.int64))[None]
        mask = torch.ones_like(tensor)
        expected = model.generate(tensor, attention_mask=mask, do_sample=False, max_new_tokens=20)[0, len(ids) :]
        assert completion.token_ids.tolist() == expected.tolist()
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, ids, completion), atol=1e-4)


def test_samples_follow_the_model_distribution():
    model = make_model("llama")
    engine = make_engine(model, rows=4000)
    ids = prompt(5)
    group = asyncio.run(closing(engine, engine.generate(request(ids, 4000, new=1))))
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0, -1]
    expected = torch.softmax(logits.float(), -1).numpy()
    counts = np.bincount([int(c.token_ids[0]) for c in group], minlength=VOCABULARY)
    error = np.sqrt(expected * (1 - expected) / 4000)
    assert (np.abs(counts / 4000 - expected) < 5 * error + 1e-3).all()


def test_same_seed_gives_the_same_tokens_whatever_else_is_in_the_batch():
    model = make_model("qwen3")

    def run(others: int):
        engine = make_engine(model)

        async def work():
            noise = [engine.generate(request(prompt(3 + i), 3, seed=100 + i)) for i in range(others)]
            return (await asyncio.gather(*noise, engine.generate(request(prompt(6), 2, seed=7))))[-1]

        return asyncio.run(closing(engine, work()))

    for alone, crowded in zip(run(0), run(8), strict=True):
        assert alone.token_ids.tolist() == crowded.token_ids.tolist()


def test_siblings_differ_and_a_prompt_is_prefilled_once_per_group():
    engine = make_engine(make_model("qwen2"))

    async def work():
        group = await engine.generate(request(prompt(9), 8, new=10))
        return group, engine.stats()

    group, stats = asyncio.run(closing(engine, work()))
    assert len({tuple(c.token_ids.tolist()) for c in group}) > 1
    assert stats["prefill_rows"] == 1 and stats["prefill_tokens"] == 9
    assert stats["generated_tokens"] == 80 and stats["decode_rows"] == 72


def test_the_stop_token_is_included_and_ends_the_sequence():
    model = make_model("llama")
    engine = make_engine(model, rows=128)
    stops = (5, 6)
    group = asyncio.run(closing(engine, engine.generate(request(prompt(4), 100, new=40, stop=stops))))
    assert {c.finish_reason for c in group} == {"stop", "length"}
    for completion in group:
        stopped = [token in stops for token in completion.token_ids.tolist()]
        assert not any(stopped[:-1])
        assert stopped[-1] == (completion.finish_reason == "stop")
        assert stopped[-1] or len(completion.token_ids) == 40


def test_an_update_in_flight_changes_versions_in_the_middle_of_running_sequences():
    model, other = make_model("qwen2"), make_model("qwen2", seed=1)
    engine = make_engine(model)
    ids = prompt(5)

    async def work():
        await asyncio.to_thread(engine.load_weights, 3, weights_of(model))
        running = asyncio.ensure_future(engine.generate(request(ids, 4, new=240)))
        await until(lambda: engine.stats()["decode_steps"] >= 3)
        await asyncio.to_thread(engine.load_weights, 4, weights_of(other))
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
    engine = make_engine(model)
    ids = prompt(5)

    async def work():
        running = asyncio.ensure_future(engine.generate(request(ids, 2, new=240)))
        await until(lambda: engine.stats()["decode_steps"] >= 3)
        await asyncio.to_thread(engine.load_weights, 0, weights_of(model))
        return await running

    for completion in asyncio.run(closing(engine, work())):
        assert set(completion.policy_versions.tolist()) == {NO_VERSION, 0}
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, ids, completion), atol=1e-4)


def test_pinned_requests_have_one_version_and_do_not_starve_a_waiting_load():
    model = make_model("qwen2")
    engine = make_engine(model)

    async def work():
        await asyncio.to_thread(engine.load_weights, 1, weights_of(model))
        first = asyncio.ensure_future(engine.generate(request(prompt(4), 2, new=240, pinned=True)))
        await until(lambda: engine.stats()["decode_steps"] >= 2)
        load = asyncio.ensure_future(asyncio.to_thread(engine.load_weights, 2, weights_of(model)))
        await until(lambda: bool(engine._inbox.loads))
        second = asyncio.ensure_future(engine.generate(request(prompt(6), 1, new=10, pinned=True)))
        plain = asyncio.ensure_future(engine.generate(request(prompt(8), 1, new=3)))
        free = await plain
        early = not load.done()
        await load
        return await first, await second, free, early

    first, second, (free,), early = asyncio.run(closing(engine, work()))
    assert early, "an unpinned request goes on while a load waits for a pinned one"
    assert set(free.policy_versions.tolist()) == {1}
    assert all(set(c.policy_versions.tolist()) == {1} for c in first)
    assert all(set(c.policy_versions.tolist()) == {2} for c in second)


def test_a_load_that_waits_too_long_for_a_pinned_request_is_withdrawn():
    model = make_model("qwen2")
    engine = make_engine(model, load_timeout_s=0.0)

    async def work():
        running = asyncio.ensure_future(engine.generate(request(prompt(4), 64, new=250, pinned=True)))
        await until(lambda: engine.stats()["running"] == 64)
        with pytest.raises(WeightsError, match="pinned requests"):
            await asyncio.to_thread(engine.load_weights, 9, weights_of(model))
        assert engine.policy_version == NO_VERSION
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


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_scores_are_the_logprobs_of_a_plain_forward_while_others_are_decoded(name):
    model = make_model(name)
    engine = make_engine(model)
    sequences = [prompt(9, seed=1), prompt(2), prompt(30, seed=2)]

    async def work():
        running = asyncio.ensure_future(engine.generate(request(prompt(4), 2, new=200)))
        await until(lambda: engine.stats()["decode_steps"] >= 3)
        scored = await asyncio.to_thread(engine.score, sequences)
        assert not running.done()
        for bad in (prompt(1), np.array([1, VOCABULARY], np.int32)):
            with pytest.raises(GenerationError):
                engine.score([bad])
        return scored

    for ids, logprobs in zip(sequences, asyncio.run(closing(engine, work())), strict=True):
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            expected = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1], -1).gather(1, tokens[1:, None])
        np.testing.assert_allclose(logprobs, expected[:, 0].numpy(), atol=1e-4)


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


def test_cancelling_gives_the_slots_back():
    engine = make_engine(make_model("llama"), rows=8)

    async def work():
        hog = asyncio.ensure_future(engine.generate(request(prompt(4), 8, new=250)))
        await until(lambda: engine.stats()["running"] == 8)
        queued = asyncio.ensure_future(engine.generate(request(prompt(3), 8, new=250)))
        waiting = asyncio.ensure_future(engine.generate(request(prompt(5), 8, new=4)))
        await asyncio.sleep(0.01)
        queued.cancel()
        hog.cancel()
        group = await waiting
        await until(lambda: engine.stats()["running"] == 0)
        return group, engine.stats()

    group, stats = asyncio.run(closing(engine, work()))
    assert len(group) == 8
    assert stats["cancelled"] == 8 and stats["requests"] == 2


def test_more_requests_than_rows_are_all_answered():
    engine = make_engine(make_model("qwen2"), rows=5)

    async def work():
        calls = [engine.generate(request(prompt(2 + i % 9), 1 + i % 5, new=1 + i % 7, seed=i)) for i in range(40)]
        return await asyncio.gather(*calls)

    groups = asyncio.run(closing(engine, work()))
    assert [len(group) for group in groups] == [1 + i % 5 for i in range(40)]
    assert [len(group[0].token_ids) for group in groups] == [1 + i % 7 for i in range(40)]


def test_requests_that_can_never_fit_are_refused():
    engine = make_engine(make_model("qwen2"), rows=4)

    async def work():
        for bad, message in (
            (request(prompt(4), 5), "max_sequences=4"),
            (request(prompt(200), 1, new=100), "300 tokens, the model holds 256"),
            (request(prompt(4)[:0]), "needs a prompt"),
            (request(prompt(4), temperature=-1.0), "temperature"),
            (request(np.array([VOCABULARY], np.int32)), "vocabulary"),
        ):
            with pytest.raises(GenerationError, match=message):
                await engine.generate(bad)

    asyncio.run(closing(engine, work()))


class FailingRunner(ModelRunner):
    """Breaks in the engine thread, as a device that is lost would."""

    fails_in = ""

    def prefill(self, prompts):
        if self.fails_in == "prefill":
            raise RuntimeError("device lost")
        return super().prefill(prompts)

    def decode(self, tokens, positions):
        if self.fails_in == "decode":
            raise RuntimeError("device lost")
        return super().decode(tokens, positions)


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_an_error_in_the_engine_thread_reaches_every_caller(where):
    runner = FailingRunner(make_model("qwen2"), CPU, 4)
    engine = TransformersEngine(runner)

    async def work():
        calls = asyncio.gather(
            *(engine.generate(request(prompt(3), 2, new=240)) for _ in range(3)), return_exceptions=True
        )
        await until(lambda: engine.stats()["running"] == 4)
        runner.fails_in = where
        late = asyncio.ensure_future(engine.generate(request(prompt(3), 2, new=240)))
        errors = await calls
        with pytest.raises(GenerationError, match="device lost"):
            await late
        with pytest.raises(GenerationError, match="device lost"):
            await engine.generate(request(prompt(3)))
        with pytest.raises(WeightsError, match="device lost"):
            engine.load_weights(1, weights_of(make_model("qwen2")))
        return errors

    errors = asyncio.run(closing(engine, work()))
    assert any(isinstance(error, GenerationError) for error in errors)


def test_close_fails_what_is_still_running():
    engine = make_engine(make_model("qwen2"))

    async def work():
        running = asyncio.ensure_future(engine.generate(request(prompt(3), 4, new=250)))
        await until(lambda: engine.stats()["running"] == 4)
        await engine.close()
        with pytest.raises(GenerationError, match="closed"):
            await running

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_cache_that_cannot_be_merged_is_refused_at_start():
    config = MistralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=8,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="DynamicSlidingWindowLayer"):
        ModelRunner(AutoModelForCausalLM.from_config(config), CPU, 4)


def test_a_model_that_ignores_our_positions_is_refused_at_start():
    class NoPositions(type(make_model("llama"))):
        def forward(self, *args, position_ids=None, **kwargs):
            return super().forward(*args, **kwargs)

    model = make_model("llama")
    model.__class__ = NoPositions
    with pytest.raises(ConfigError, match="differ by"):
        make_engine(model)


def test_bfloat16_generates_with_logprobs_near_a_plain_forward():
    model = make_model("qwen3", dtype=torch.bfloat16)
    engine = make_engine(model)
    ids = prompt(6)
    group = asyncio.run(closing(engine, engine.generate(request(ids, 4))))
    for completion in group:
        assert np.isfinite(completion.logprobs).all()
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, ids, completion), atol=0.5)
