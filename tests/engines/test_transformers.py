from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, MistralConfig, MptConfig, PretrainedConfig

from asyncrl.engines.hf.engine import TransformersEngine
from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.errors import ConfigError, GenerationError, WeightsError
from tests.engines.models import (
    VOCABULARY,
    make_model,
    plain_logprobs,
    prompt,
    request,
    weights_of,
    write_own_sampling,
)
from tests.engines.running import HeldRunner, closing, make_engine, make_held, until

CPU = torch.device("cpu")


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


def test_a_wide_head_multiplies_in_float32_what_the_model_has_in_bfloat16():
    asked = [prompt(9)]
    logits = {}
    for wide in (False, True):
        runner = ModelRunner(make_model("qwen2").to(torch.bfloat16), CPU, 4, fp32_head=wide)
        _, logits[wide] = runner.prefill(asked)
    hidden = runner.model.get_decoder()(input_ids=torch.tensor(asked[0])[None].long()).last_hidden_state[0, -1:]
    head: Any = runner.model.get_output_embeddings()
    wanted = hidden.double() @ head.weight.double().t()
    assert logits[True].dtype == torch.float32 and logits[False].dtype == torch.bfloat16
    torch.testing.assert_close(logits[True].double(), wanted, rtol=1e-4, atol=1e-4)
    assert (logits[False].double() - wanted).abs().max() > 1e-3


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

    group = asyncio.run(closing(engine, engine.generate(request(prompt(9), 8, new=10))))
    stats = engine.stats()  # of a step it tells when the step is over: here the engine is closed
    assert len({tuple(c.token_ids.tolist()) for c in group}) > 1
    assert stats["prefill_rows"] == 1 and stats["prefill_tokens"] == 9
    assert stats["generated_tokens"] == 80 and stats["decode_rows"] == 72
    assert stats["decode_steps"] == 9 and stats["decode_rows_squared"] == 9 * 64
    assert stats["decode_s"] > 0 and stats["decode_rows_s"] == pytest.approx(8 * stats["decode_s"])
    assert stats["prefill_steps"] == 1 and stats["prefill_s"] == stats["prefill_rows_s"] > 0


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


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_scores_are_the_logprobs_of_a_plain_forward_while_others_are_decoded(name):
    model = make_model(name)
    engine, runner = make_held(model, steps=3)
    sequences = [prompt(9, seed=1), prompt(2), prompt(30, seed=2)]

    async def work():
        running = asyncio.ensure_future(engine.generate(request(prompt(4), 2, new=60)))
        await until(lambda: runner.held)
        scoring = asyncio.ensure_future(asyncio.to_thread(engine.score, sequences))
        await until(lambda: bool(engine._inbox.scores))
        runner.allow(1)
        scored = await scoring
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


def test_cancelling_gives_the_slots_back():
    engine, runner = make_held(make_model("llama"), steps=2, rows=8)

    async def work():
        hog = asyncio.ensure_future(engine.generate(request(prompt(4), 8, new=250)))
        await until(lambda: runner.held)
        queued = asyncio.ensure_future(engine.generate(request(prompt(3), 8, new=250)))
        waiting = asyncio.ensure_future(engine.generate(request(prompt(5), 8, new=4)))
        await until(lambda: len(engine._inbox.waiting) == 2)
        queued.cancel()
        hog.cancel()
        await asyncio.wait([queued, hog])
        runner.allow(math.inf)
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


def test_callers_whose_sequences_end_in_one_step_are_woken_by_one_call():
    engine, runner = make_held(make_model("qwen2"), steps=0)

    async def work():
        loop: Any = asyncio.get_running_loop()
        wake_ups = []
        wake = loop.call_soon_threadsafe

        def counted(*callback):
            wake_ups.append(callback)
            return wake(*callback)

        calls = [asyncio.ensure_future(engine.generate(request(prompt(3), 2, new=4, seed=i))) for i in range(6)]
        await until(lambda: runner.held)
        loop.call_soon_threadsafe = counted
        runner.allow(math.inf)
        groups = await asyncio.gather(*calls)
        loop.call_soon_threadsafe = wake
        return groups, wake_ups

    groups, wake_ups = asyncio.run(closing(engine, work()))
    assert 1 <= len(wake_ups) < 6  # the first may be prefilled alone
    assert all(len(completion.token_ids) == 4 for group in groups for completion in group)


def test_requests_that_can_never_fit_are_refused():
    engine = make_engine(make_model("qwen2"), rows=4)

    async def work():
        for bad, message in (
            (request(prompt(4), 5), "max_sequences=4"),
            (request(prompt(200), 1, new=100), "300 tokens, but the engine holds 256"),
            (request(prompt(4)[:0]), "needs a prompt"),
            (request(prompt(4), temperature=-1.0), "temperature"),
            (request(np.array([VOCABULARY], np.int32)), "vocabulary"),
        ):
            with pytest.raises(GenerationError, match=message):
                await engine.generate(bad)

    asyncio.run(closing(engine, work()))


class FailingRunner(HeldRunner):
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
    runner.allow(2)

    async def work():
        calls = asyncio.gather(
            *(engine.generate(request(prompt(3), 2, new=40)) for _ in range(3)), return_exceptions=True
        )
        await until(lambda: runner.held)
        assert engine.stats()["running"] == 4
        runner.fails_in = where
        runner.allow(math.inf)
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
    engine, runner = make_held(make_model("qwen2"), steps=2)

    async def work():
        running = asyncio.ensure_future(engine.generate(request(prompt(3), 4, new=40)))
        await until(lambda: runner.held)
        closes = asyncio.ensure_future(engine.close())
        await until(lambda: engine._inbox.closed)
        runner.allow(math.inf)
        await closes
        with pytest.raises(GenerationError, match="closed"):
            await running

    asyncio.run(closing(engine, work()))


def test_a_cache_that_cannot_be_merged_is_refused_at_start():
    config = MistralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=8,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="layers with a sliding window"):
        ModelRunner(AutoModelForCausalLM.from_config(config), CPU, 4)


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=32, hidden_size=32, n_layer=1, n_head=2, initializer_range=0.5),
        MptConfig(vocab_size=32, d_model=32, n_layers=1, n_heads=2, initializer_range=0.5),
    ],
    ids=["bloom", "mpt"],
)
def test_a_model_without_positions_is_refused_in_a_sentence(config: PretrainedConfig):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with pytest.raises(ConfigError, match=f"model type '{config.model_type}' cannot be batched"):
        make_engine(model)


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
