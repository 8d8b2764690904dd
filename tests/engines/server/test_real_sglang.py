"""`engine=sglang` on a real SGLang: whose its tokens are, what an update does to it, its death and its return.

    ASYNCRL_TEST_SGLANG=/its/venv/bin/python pytest -m long tests/engines/server/test_real_sglang.py

SGLang wants packages of other versions than ours, so it has an environment of its own, on this machine.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncrl.engines.factory import make_server_engine
from asyncrl.engines.server import engine as server_engine
from asyncrl.engines.server import sglang_servers
from asyncrl.engines.server.sglang_servers import SglangServers
from asyncrl.types import NO_VERSION
from tests.vllm.live import TooLateError, in_time, when_tokens_flow
from tests.vllm.models import engine_config, logprobs_of, make_model, prompt, request, worst
from tests.vllm.servers import RealServer

PYTHON = os.environ.get("ASYNCRL_TEST_SGLANG", "")
WITH_SGLANG = pytest.mark.skipif(not PYTHON, reason="ASYNCRL_TEST_SGLANG names no Python that has SGLang")
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200), WITH_SGLANG]
CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--grammar-backend", "none", "--max-total-tokens", "20000"),
)
TOLERANCE = 1e-4
TOKENS = 300
"""Of a sequence that is to be there still when something happens to its server: some seconds."""
MODELS = {seed: make_model("qwen3_tied", seed) for seed in (1, 2)}


class SglangServer(RealServer):
    def command(self, folder: Path) -> list[str]:
        own = ("--skip-tokenizer-init", "--incremental-streaming-output", "--dtype", "float32")
        return [PYTHON, "-m", "sglang.launch_server", "--model-path", str(folder), *own, *CPU]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    folder = tmp_path_factory.mktemp("model")
    engine_config(folder, "qwen3_tied")
    with SglangServer(folder, tmp_path_factory.mktemp("server") / "log").running() as server:
        yield server


@pytest.fixture(scope="module")
def engine(server: SglangServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServers]:
    folder = tmp_path_factory.mktemp("settings")
    config = engine_config(folder, "qwen3_tied")
    config.engine.name, config.engine.urls, config.engine.dtype = "sglang", [server.url], "float32"
    config.data.max_prompt_tokens = config.rollout.max_new_tokens = 64
    config.run.dir = str(folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_engine, "LOOK_S", 0.2)
        patch.setattr(sglang_servers, "RETRY_S", 1.0)
        made = make_server_engine(config)
        assert isinstance(made, SglangServers)
        yield made
        asyncio.run(made.close())


def model_of(version: int):
    return MODELS[version % 2 + 1]


def update(engine: SglangServers) -> int:
    """One more version, proven by its log-probs; odd and even ones are different models."""
    version = engine.policy_version + 1
    engine.load_weights(version, {name: each.detach() for name, each in model_of(version).named_parameters()})
    (scored,) = engine.score([prompt(11)])
    np.testing.assert_allclose(scored, logprobs_of(model_of(version), prompt(11)), atol=TOLERANCE)
    return version


def test_tokens_carry_the_log_probs_and_the_version_of_the_weights_that_a_server_was_given(
    engine: SglangServers,
) -> None:
    (own,) = asyncio.run(engine.generate(request(prompt(7), new=12)))
    assert (own.policy_versions == NO_VERSION).all()
    for _ in range(4):
        version = update(engine)
        for completion in asyncio.run(engine.generate(request(prompt(7), 3, new=24))):
            assert len(completion.token_ids) == 24 and (completion.policy_versions == version).all()
            assert worst(model_of(version), prompt(7), completion).max() < TOLERANCE


def test_a_sequence_that_weights_overtake_is_made_again_and_all_of_it_is_of_the_new_ones(engine: SglangServers) -> None:
    async def work():
        await asyncio.to_thread(update, engine)
        before = engine.stats()["restarted"]
        running = asyncio.create_task(engine.generate(request(prompt(9), 3, new=TOKENS)))
        await when_tokens_flow(engine)
        version = await asyncio.to_thread(update, engine)
        completions = await running
        if engine.stats()["restarted"] == before:
            raise TooLateError
        return version, completions

    version, completions = in_time(work)
    for completion in completions:
        assert len(completion.token_ids) == TOKENS and (completion.policy_versions == version).all()
        assert worst(model_of(version), prompt(9), completion).max() < TOLERANCE


def test_what_a_killed_server_was_making_is_made_again_once_it_is_back_and_was_given_the_weights(
    engine: SglangServers, server: SglangServer
) -> None:
    async def work():
        version = await asyncio.to_thread(update, engine)
        before = engine.stats()
        running = asyncio.create_task(engine.generate(request(prompt(9), 3, new=TOKENS)))
        await when_tokens_flow(engine)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        completions = await running
        after = engine.stats()
        if after["restarted"] == before["restarted"]:
            raise TooLateError
        return version, before, after, completions

    version, before, after, completions = in_time(work)
    assert after["lost_servers"] > before["lost_servers"] and after["restarted"] >= before["restarted"] + 3
    for completion in completions:
        assert len(completion.token_ids) == TOKENS and (completion.policy_versions == version).all()
        assert worst(model_of(version), prompt(9), completion).max() < TOLERANCE
    server.kill()  # that process is of this test, not of the module
