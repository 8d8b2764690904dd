"""From a config to a running worker: replay client, engine, weight subscriber, rewards, loop; and back down again."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from asyncrl.data.prompts import PromptSource
from asyncrl.engines.base import Engine, OwnProcesses
from asyncrl.engines.expected import expected_parameters
from asyncrl.engines.factory import make_engine
from asyncrl.environments.guard import GuardedEnvironment
from asyncrl.environments.registry import make_environment
from asyncrl.replay.client import RolloutClient
from asyncrl.replay.payload import MAX_VOCABULARY
from asyncrl.rewards.filter_pool import FilterPool
from asyncrl.rollout.end_watch import EndWatch
from asyncrl.rollout.episode import EpisodeRunner, GroupShape
from asyncrl.rollout.filters import Filters, built_in_filters
from asyncrl.rollout.loop_watch import LoopWatch
from asyncrl.rollout.report import WorkerReport
from asyncrl.rollout.reward_parts import RewardParts
from asyncrl.rollout.rewards import make_rewards
from asyncrl.rollout.tokenizer import check_vocabulary, load_tokenizer, make_decode, make_encode, stop_token_ids
from asyncrl.rollout.version_hold import VersionHold
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.schema import Config, RolloutConfig
from asyncrl.types import SamplingParams
from asyncrl.weights.base import Subscriber
from asyncrl.weights.factory import make_subscriber


@dataclass(frozen=True, slots=True, kw_only=True)
class _Texts:
    """What of a worker depends on the tokenizer and the data files."""

    tokenizer: Any
    vocabulary: int
    """Token ids are below it."""
    prompts: PromptSource
    evaluation_rows: PromptSource | None
    sampling: SamplingParams


async def run_worker(config: Config, name: str, digest: str, ending: EndWatch) -> None:
    """One rollout worker, from nothing to the server's stop.

    Raises:
        ConfigError, DataError: a setting or a row of the data can never work; restarting is useless.
        AsyncRLError: anything else that ended it.
    """
    texts = _load_texts(config)
    environment = make_environment(config.environment, texts.vocabulary)
    report = WorkerReport()
    async with contextlib.AsyncExitStack() as stack:
        rewards = await stack.enter_async_context(make_rewards(config))
        own_filters = [
            await stack.enter_async_context(FilterPool(function, timeout_s=config.reward.timeout_s))
            for function in config.rollout.filters
        ]
        engine = make_engine(config)
        stack.push_async_callback(engine.close)
        replay = RolloutClient(
            config.replay.address, worker=name, run_digest=digest, stats=report, config=config.replay
        )
        stack.push_async_callback(replay.close)
        hold = VersionHold(engine.load_weights, config.replay.wait_timeout_s)
        subscriber = _subscriber(config, name, replay, engine, hold)
        stack.callback(subscriber.close)
        for source in (engine.stats, rewards.stats, subscriber.stats, *(pool.stats for pool in own_filters)):
            report.add(source)
        if isinstance(environment, GuardedEnvironment):
            report.add(environment.stats)
        runner = EpisodeRunner(
            engine=engine,
            environment=environment,
            decode=make_decode(texts.tokenizer),
            encode=make_encode(texts.tokenizer),
            score=rewards.score,
            parts=RewardParts.of(config.advantage, texts.sampling, reference=config.reference.from_rollout),
        )
        worker = RolloutWorker(
            name=name,
            replay=replay,
            runner=runner,
            prompts=texts.prompts,
            evaluation_rows=texts.evaluation_rows,
            check=subscriber.check,
            proven=lambda: subscriber.proven,
            filters=Filters(built_in_filters(config.rollout), own_filters),
            shape=group_shape(config.rollout),
            sampling=texts.sampling,
            slots=slots_per_worker(config),
            # Half of the learner's patience: a stuck engine is replaced before the learner gives up on it.
            wait_timeout_s=config.replay.wait_timeout_s / 2,
            hold=hold,
            report=report,
        )
        report.start_clocks()
        with LoopWatch(limit_s=config.replay.wait_timeout_s / 2), ending:
            await worker.run()


def _subscriber(config: Config, name: str, replay: RolloutClient, engine: Engine, hold: VersionHold) -> Subscriber:
    # The fake engine has no model: nothing to prove, nothing to hold names against.
    model_less = config.engine.name == "fake"
    return make_subscriber(
        config,
        replay.rendezvous(),
        name,
        replay.incarnation,
        hold.load_weights,
        engine.receiver() if isinstance(engine, OwnProcesses) else None,
        score=None if model_less else engine.score,
        stall_s=lambda: engine.stats()["stall_s"],
        admit=None if model_less else expected_parameters(config.model.path).check,
    )


def group_shape(rollout: RolloutConfig) -> GroupShape:
    return GroupShape(
        size=rollout.group_size,
        fewest=rollout.min_group_size or rollout.group_size,
        tries=rollout.max_attempts,
    )


def slots_per_worker(config: Config) -> int:
    """Groups one worker makes at once: its share of `rollout.max_in_flight`, and no more than keep its engine full.

    A quarter more than the engine decodes together, so that a finished group's place is taken without a round trip.
    """
    share = -(-config.rollout.max_in_flight // config.rollout.workers)
    together = max(1, config.engine.max_sequences // config.rollout.group_size)
    return max(1, min(share, together + -(-together // 4)))


def _load_texts(config: Config) -> _Texts:
    tokenizer = load_tokenizer(config.model.path)
    vocabulary = MAX_VOCABULARY if config.engine.name == "fake" else check_vocabulary(config.model.path, tokenizer)
    limit = config.data.max_prompt_tokens
    prompts = PromptSource(
        config.data.path, tokenizer, seed=config.seed, shuffle=config.data.shuffle, max_prompt_tokens=limit
    )
    evaluation_rows = None
    if config.eval.path:
        evaluation_rows = PromptSource(config.eval.path, tokenizer, seed=0, shuffle=False, max_prompt_tokens=limit)
    sampling = SamplingParams(
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        stop_token_ids=stop_token_ids(config.model.path, tokenizer),
    )
    return _Texts(
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        prompts=prompts,
        evaluation_rows=evaluation_rows,
        sampling=sampling,
    )
