"""An engine over a tiny model, as the tests of the transformers engine start it."""

from __future__ import annotations

import asyncio
import copy

import torch

from asyncrl.engines.runner import ModelRunner
from asyncrl.engines.transformers import TransformersEngine

CPU = torch.device("cpu")


def make_engine(model: torch.nn.Module, rows: int = 64, **kwargs) -> TransformersEngine:
    return TransformersEngine(ModelRunner(copy.deepcopy(model), CPU, rows), **kwargs)


async def closing(engine: TransformersEngine, work):
    try:
        return await asyncio.wait_for(work, 60)
    finally:
        await engine.close()


async def until(condition) -> None:
    async with asyncio.timeout(50):
        while not condition():
            await asyncio.sleep(0.0005)
