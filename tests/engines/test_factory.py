from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncrl.engines.factory import make_engine
from asyncrl.engines.fake import FakeEngine
from asyncrl.errors import ConfigError
from asyncrl.schema import Config
from tests.engines.models import make_model, plain_logprobs, prompt, request


def test_a_checkpoint_directory_becomes_an_engine(tmp_path):
    model = make_model("qwen3")
    model.save_pretrained(tmp_path)
    config = Config()
    config.model.path, config.engine.device, config.engine.max_sequences = str(tmp_path), "cpu", 8
    engine = make_engine(config)

    async def work():
        (completion,) = await engine.generate(request(prompt(5)))
        await engine.close()
        return completion

    completion = asyncio.run(work())
    np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, prompt(5), completion), atol=1e-4)


def test_the_fake_engine_goes_by_name_and_other_names_are_refused():
    config = Config()
    config.engine.name = "fake"
    assert isinstance(make_engine(config), FakeEngine)
    for key, value in (("name", "vlllm"), ("dtype", "float8")):
        broken = Config()
        setattr(broken.engine, key, value)
        with pytest.raises(ConfigError, match=value):
            make_engine(broken)
