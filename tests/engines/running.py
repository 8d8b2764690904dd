"""Engines over a tiny model, for the tests of the transformers engine."""

from __future__ import annotations

import asyncio
import copy
import math
import threading
from collections.abc import Mapping

import torch

from asyncrl.engines.hf.engine import TransformersEngine
from asyncrl.engines.hf.runner import ModelRunner

CPU = torch.device("cpu")


class HeldRunner(ModelRunner):
    """A runner that decodes only as far as the test allows. What the test does then happens between two tokens, on a
    slow machine too."""

    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, **settings)
        self._taken, self._allowed = 0, math.inf
        self.held = False
        """True while the engine's thread waits to be allowed more steps: it takes nothing out of its inbox."""
        self._changed = threading.Condition()

    def allow(self, steps: float) -> None:
        """Allow `steps` more decode steps from now on."""
        with self._changed:
            self._allowed, self.held = self._taken + steps, False
            self._changed.notify_all()

    def decode(self, tokens, positions):
        with self._changed:
            self.held = self._taken >= self._allowed
            assert self._changed.wait_for(lambda: self._taken < self._allowed, 120), "never allowed to go on"
            self.held = False
            self._taken += 1
        return super().decode(tokens, positions)


def make_engine(model: torch.nn.Module, rows: int = 64, **kwargs) -> TransformersEngine:
    return TransformersEngine(ModelRunner(copy.deepcopy(model), CPU, rows), **kwargs)


def make_held(
    model: torch.nn.Module, steps: int, rows: int = 64, adapters: bool = False, **kwargs
) -> tuple[TransformersEngine, HeldRunner]:
    """Return an engine that takes `steps` decode steps and then waits to be allowed more, and its runner."""
    runner = HeldRunner(copy.deepcopy(model), CPU, rows, adapters=adapters)
    engine = TransformersEngine(runner, **kwargs)  # it checks its model at construction, which takes decode steps too
    runner.allow(steps)
    return engine, runner


async def asked_to_load(
    engine: TransformersEngine, runner: HeldRunner, version: int, tensors: Mapping[str, torch.Tensor]
) -> asyncio.Future[None]:
    """Start an update that arrives between two tokens, and return its future. It ends once the engine may go on."""
    await until(lambda: runner.held)
    load = asyncio.ensure_future(asyncio.to_thread(engine.load_weights, version, tensors))
    await until(lambda: bool(engine._inbox.loads))
    return load


async def closing(engine: TransformersEngine, work):
    try:
        return await asyncio.wait_for(work, 90)
    finally:
        if isinstance(engine._runner, HeldRunner):
            engine._runner.allow(math.inf)
        await engine.close()


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.0005)
