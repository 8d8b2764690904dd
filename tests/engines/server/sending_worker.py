"""A worker that sends weights, in a process of its own, and is killed by itself in the middle of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import torch

from asyncrl.engines.factory import make_server_engine
from asyncrl.engines.server import sglang_sender
from asyncrl.engines.server.sglang_servers import SglangServers
from asyncrl.schema import Config


def config_of(folder: str, urls: Sequence[str], *, weights: str, timeout_s: float) -> Config:
    config = Config()
    config.model.path, config.engine.name, config.run.dir = folder, "sglang", f"{folder}/run"
    config.engine.urls, config.engine.weights = list(urls), weights
    config.data.max_prompt_tokens, config.rollout.max_new_tokens = 24, 16
    config.weights.bucket_mb, config.weights.timeout_s = 1, timeout_s
    return config


def engine_of(config: Config) -> SglangServers:
    made = make_server_engine(config)
    assert isinstance(made, SglangServers)
    return made


def random_weights(engine: SglangServers, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = engine._parameters._required
    return {name: torch.randn(each.shape, generator=draw) + seed for name, each in shapes.items()}


def killed_at(folder: str, urls: Sequence[str], bucket: int) -> None:
    """Send version 0, and die when the server waits for this bucket of version 1."""
    engine = engine_of(config_of(folder, urls, weights="distributed", timeout_s=60.0))
    engine.load_weights(0, random_weights(engine, 0))
    sent, broadcast = 0, sglang_sender._broadcast

    def dying(*given: Any) -> None:
        nonlocal sent
        sent += 1
        if sent == bucket:
            os.kill(os.getpid(), signal.SIGKILL)
        broadcast(*given)

    sglang_sender._broadcast = dying
    engine.load_weights(1, random_weights(engine, 1))
