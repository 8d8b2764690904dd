"""Runs an evaluation from a config: sets up tokenizer, environment, rewards, engine and loop, and closes them again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from transformers.utils import logging as transformers_logging

from asyncrl.engines.base import Engine, GenerateRequest
from asyncrl.engines.factory import make_engine
from asyncrl.environments.guard import close_environment
from asyncrl.evaluator.folder import EvalFolder
from asyncrl.evaluator.loop import EvalPlan, Evaluator
from asyncrl.rollout.rewards.factory import make_rewards
from asyncrl.rollout.rewards.watch import RewardWatch
from asyncrl.rollout.worker.concurrency import prompts_that_fill
from asyncrl.rollout.worker.report import WorkerReport
from asyncrl.rollout.worker.watchdog import EndWatch, LoopWatch
from asyncrl.rollout.worker.wiring import environment_of, evaluation_sampling, load_texts, make_runner
from asyncrl.schema import Config
from asyncrl.types import Completion

VERSION = 0
"""Version of the weights in the model's folder, which no learner has published."""


class FixedWeights:
    """An engine that keeps serving its initial weights, wrapped for the episodes of an evaluation."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def max_length(self) -> int:
        return self._engine.max_length

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """As `Engine.generate`, with `VERSION` as the version of all tokens: an engine without a loaded version gives
        them none, but episodes are checked for one."""
        completions = await self._engine.generate(request)
        return [replace(one, policy_versions=np.full(len(one.token_ids), VERSION, np.int32)) for one in completions]


def run_rows(config: Config, todo: Sequence[int], folder: EvalFolder, say: Callable[[str], None]) -> None:
    """Evaluate rows `todo` into `folder`, in an event loop of its own.

    Raises:
        KeyboardInterrupt, CancelledError: Ctrl-C; SIGTERM. Finished rows stay in the folder.
        AsyncRLError: see `Evaluator.run`; and errors of the parts when they start.
    """
    # vLLM's dependencies install uvloop. The default loop keeps this the same as in a rollout worker.
    transformers_logging.disable_progress_bar()
    asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
    ending = EndWatch()
    try:
        asyncio.run(_run(config, todo, folder, say, ending))
    finally:
        ending.over()


async def _run(
    config: Config, todo: Sequence[int], folder: EvalFolder, say: Callable[[str], None], ending: EndWatch
) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    texts = load_texts(config)
    environment = environment_of(config, texts)
    report, patience_s = WorkerReport(), config.replay.wait_timeout_s / 2
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(close_environment, environment)
        rewards = await stack.enter_async_context(make_rewards(config))
        engine = make_engine(config)
        stack.push_async_callback(engine.close)
        report.add(engine.stats)
        runner = make_runner(
            config, texts, FixedWeights(engine), environment, rewards, report=report, watch=RewardWatch()
        )
        say("the engine is ready")
        evaluator = Evaluator(
            runner,
            texts.prompts,
            EvalPlan(
                samples=config.eval.samples,
                sampling=evaluation_sampling(texts, config.eval),
                seed=config.seed,
                together=prompts_that_fill(config.engine.max_sequences, config.eval.samples),
                wait_timeout_s=patience_s,
                max_failure_share=config.reward.max_failure_share,
            ),
            progress=report.progress,
            keep=folder.add,
            say=say,
        )
        with LoopWatch(limit_s=patience_s), ending:
            await evaluator.run(todo)
