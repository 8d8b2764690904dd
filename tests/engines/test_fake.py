from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from asyncrl.engines import fake
from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.fake import FakeEngine
from asyncrl.errors import GenerationError
from asyncrl.types import SamplingParams


def request(**changes) -> GenerateRequest:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=12, stop_token_ids=(1,))
    ids = np.arange(4, dtype=np.int32)
    fields = {"request_id": "r", "prompt_ids": ids, "n": 4, "sampling": sampling, "seed": 3}
    return GenerateRequest(**(fields | changes))


def run(engine: FakeEngine, one: GenerateRequest):
    return asyncio.run(engine.generate(one))


def as_lists(group):
    return [(c.token_ids.tolist(), c.logprobs.tolist(), c.finish_reason) for c in group]


def test_the_answer_is_a_pure_function_of_seed_prompt_member_and_version():
    base = as_lists(run(FakeEngine(), request()))
    assert base == as_lists(run(FakeEngine(), request(request_id="other")))
    assert base != as_lists(run(FakeEngine(), request(seed=4)))
    assert base != as_lists(run(FakeEngine(), request(prompt_ids=np.arange(1, 5, dtype=np.int32))))
    assert len({str(member) for member in base}) == 4
    updated = FakeEngine()
    updated.load_weights(1, {})
    assert base != as_lists(run(updated, request()))


def test_every_token_can_be_checked_against_the_engine():
    engine = FakeEngine()
    engine.load_weights(5, {})
    for member, completion in enumerate(run(engine, request())):
        for position, token in enumerate(completion.token_ids):
            last = position + 1 == len(completion.token_ids)
            assert engine.token(request(), member, position, 5, last=last)[0] == token
        assert (completion.token_ids[-1] == 1) == (completion.finish_reason == "stop")
        assert not (completion.token_ids[:-1] == 1).any()


def test_an_update_in_flight_splits_versions(monkeypatch):
    engine = FakeEngine()

    async def sleep(_: float) -> None:
        await asyncio.sleep(0)
        if engine.stats()["decode_steps"] == 3:
            engine.load_weights(0, {})

    monkeypatch.setattr(fake, "asyncio", SimpleNamespace(sleep=sleep))
    group = run(engine, request(sampling=SamplingParams(temperature=1.0, max_new_tokens=50)))
    for completion in group:
        assert completion.policy_versions.tolist() == [-1] * 3 + [0] * 47


def test_a_closed_fake_fails_what_runs():
    engine = FakeEngine(latency_s=0.005)

    async def work():
        running = asyncio.ensure_future(engine.generate(request()))
        await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(GenerationError):
            await running

    asyncio.run(work())


def test_the_fake_engine_needs_no_torch():
    code = "import sys, asyncrl.engines.fake; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=150, check=False).returncode == 0
