"""The process that `together` starts beside its own: an engine that samples all the time and loads each version."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import torch

from asyncrl.engines.base import Engine, GenerateRequest
from asyncrl.engines.factory import make_engine
from asyncrl.schema import Config
from asyncrl.types import SamplingParams
from asyncrl.weights.factory import make_subscriber
from asyncrl.weights.subscriber import Subscriber
from tests.weights.board import WorkerRendezvous, end_with_tests

NAMES, INCARNATION = ("a", "b"), "1"
PROMPT, COMPLETION = 16, 64
"""Lengths in tokens. A sequence ends long before the next version comes."""


def engine_beside(board: Any, config: Config, name: str) -> None:
    """Run a rollout worker without its queue, until it is killed or its subscriber raises."""
    end_with_tests()
    torch.set_num_threads(1)
    engine = make_engine(config)
    board.join(name, INCARNATION)
    subscriber = make_subscriber(
        config,
        WorkerRendezvous(board, name),
        name,
        INCARNATION,
        engine.load_weights,
        score=engine.score,
        stall_s=lambda: engine.stats()["stall_s"],
    )
    asyncio.run(sample(board, config, name, engine, subscriber))


async def sample(board: Any, config: Config, name: str, engine: Engine, subscriber: Subscriber) -> None:
    """Sample for ever. Note the first completion of each request, and the number of tokens and seconds of all."""
    rng, n = np.random.default_rng(0), config.rollout.group_size
    while True:
        subscriber.check()
        if engine.policy_version < 0:
            await asyncio.sleep(0.02)
            continue
        prompt, began = rng.integers(0, 256, PROMPT).astype(np.int32), time.perf_counter()
        sampling = SamplingParams(temperature=1.0, max_new_tokens=COMPLETION)
        request = GenerateRequest(request_id="", prompt_ids=prompt, n=n, sampling=sampling, seed=int(rng.integers(99)))
        made = await engine.generate(request)
        note = {
            "worker": name,
            "prompt": prompt.tolist(),
            "ids": made[0].token_ids.tolist(),
            "logprobs": made[0].logprobs.tolist(),
            "versions": made[0].policy_versions.tolist(),
            "tokens": sum(len(each.token_ids) for each in made),
            "seconds": time.perf_counter() - began,
        }
        board.note("sampled", note)
