"""From a config to a running worker: replay client, engine, weight subscriber, rewards, loop; and back down again."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from asyncrl.chat.choice import open_chat, told
from asyncrl.chat.renderer import RendererChat
from asyncrl.chat.turn_end import described
from asyncrl.checks.evaluations import EvalSet, eval_sets
from asyncrl.checks.permanent import refused_if_permanent
from asyncrl.checks.rewards import compared_parts
from asyncrl.checks.rules.settings import ENVIRONMENTS
from asyncrl.checks.sources import Source
from asyncrl.data.dataset import open_alone, open_dataset
from asyncrl.data.local_tokenizer import LocalTokenizer, own_tokenizer, tokenizer_digest
from asyncrl.data.prompts import PromptSource
from asyncrl.engines.base import Engine, OwnProcesses, Sampler, Several
from asyncrl.engines.expected import expected_parameters
from asyncrl.engines.factory import make_engine
from asyncrl.environments.base import Environment
from asyncrl.environments.guard import GuardedEnvironment, close_environment
from asyncrl.environments.registry import make_environment
from asyncrl.errors import DataError
from asyncrl.evaluation.samples import spread
from asyncrl.replay.client.client import RolloutClient
from asyncrl.replay.codec.group import MAX_VOCABULARY
from asyncrl.rewards.filter_pool import FilterPool
from asyncrl.rollout.groups.episode import EpisodeRunner, GroupShape
from asyncrl.rollout.groups.evaluated import EvaluatedSet, told_apart
from asyncrl.rollout.groups.filters import Filters, built_in_filters
from asyncrl.rollout.groups.outcomes import GroupOutcomes
from asyncrl.rollout.rewards.factory import Rewards, make_rewards
from asyncrl.rollout.rewards.parts import RewardParts
from asyncrl.rollout.rewards.watch import RewardWatch
from asyncrl.rollout.worker.concurrency import slots_per_worker
from asyncrl.rollout.worker.copies import SameCopies
from asyncrl.rollout.worker.report import WorkerReport
from asyncrl.rollout.worker.tokenizer import (
    check_vocabulary,
    load_tokenizer,
    make_decode,
    make_encode,
    stop_token_ids,
)
from asyncrl.rollout.worker.watchdog import EndWatch, LoopWatch
from asyncrl.rollout.worker.worker import Evaluate, RolloutWorker
from asyncrl.schema import Config, EnvironmentConfig, EvalConfig, RewardConfig, RolloutConfig
from asyncrl.types import SamplingParams
from asyncrl.weights.factory import make_subscriber
from asyncrl.weights.subscriber import Subscriber

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What of a worker depends on the tokenizer and the data files."""

    tokenizer: Any
    chat: RendererChat
    vocabulary: int
    """Token ids are below it."""
    prompts: PromptSource
    sampling: SamplingParams


async def run_worker(config: Config, name: str, digest: str, ending: EndWatch) -> None:
    """One rollout worker, from nothing to the server's stop.

    Raises:
        ConfigError, DataError: a setting or a row of the data can never work; restarting is useless.
        AsyncRLError: anything else that ended it.
    """
    own = own_tokenizer(config.model.path)
    texts, tokens = load_texts(config, own), tokenizer_digest(config.model.path, own)
    del own  # of its vocabulary alone it has tens of megabytes
    environment = environment_of(config, texts)
    report = WorkerReport()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(close_environment, environment)
        rewards = await stack.enter_async_context(make_rewards(config))
        scorings = [Scoring(config.environment, config.reward, environment, rewards)]
        filters = await filters_of(config, texts, stack)
        with refused_if_permanent(f"engine={config.engine.name} cannot serve model.path={config.model.path}"):
            engine = make_engine(config)
        stack.push_async_callback(engine.close)
        replay = RolloutClient(
            config.replay.address, worker=name, run_digest=digest, stats=report, config=config.replay
        )
        stack.push_async_callback(replay.close)
        copies = SameCopies(replay.rendezvous(), config, tokens)
        subscriber = _subscriber(config, name, replay, engine, copies)
        stack.callback(subscriber.close)
        own_filters = (pool.stats for pool in filters.own)
        for source in (texts.prompts.stats, engine.stats, rewards.stats, subscriber.stats, copies.stats, *own_filters):
            report.add(source)
        watch = RewardWatch(config.reward.max_failure_share, texts.prompts.where)
        report.add(watch.stats)
        if isinstance(environment, GuardedEnvironment):
            report.add(environment.stats)
        runner = make_runner(config, texts, engine, environment, rewards, report=report, watch=watch)
        worker = RolloutWorker(
            name=name,
            replay=replay,
            runner=runner,
            prompts=texts.prompts,
            evaluations={
                each.name: await evaluation_of(each, texts, engine, scorings, stack, report)
                for each in eval_sets(config)
            },
            check=subscriber.check,
            proven=lambda: subscriber.proven,
            filters=filters,
            shape=group_shape(config.rollout),
            sampling=texts.sampling,
            slots=slots_per_worker(config),
            # Half of the learner's patience: a stuck engine is replaced before the learner gives up on it.
            wait_timeout_s=config.replay.wait_timeout_s / 2,
            report=report,
            rows=texts.prompts.rows_by_source if config.data.curriculum else (),
            outcomes=GroupOutcomes(
                config.reward.max_failure_share, workers=config.rollout.workers, where=texts.prompts.where
            ),
        )
        report.start_clocks()
        log.info("the engine is ready")  # `asyncrl local` says so
        with LoopWatch(limit_s=config.replay.wait_timeout_s / 2), ending:
            await worker.run()


def environment_of(config: Config, texts: Texts) -> Environment:
    """Make the environment of the settings for this model. Raises ConfigError as `make_environment` does."""
    return make_environment(config.environment, texts.vocabulary, texts.chat, overlong=config.data.overlong)


@dataclass(frozen=True, slots=True)
class Scoring:
    """An environment with its rewards, and the settings that it was made of."""

    environment_settings: EnvironmentConfig
    reward_settings: RewardConfig
    environment: Environment
    rewards: Rewards


async def filters_of(config: Config, texts: Texts, opened: contextlib.AsyncExitStack) -> Filters:
    """`rollout.filters` in processes of their own, which `opened` closes, behind those that the settings name."""
    own = [
        await opened.enter_async_context(FilterPool(function, timeout_s=config.reward.timeout_s))
        for function in config.rollout.filters
    ]
    built_in = built_in_filters(config.rollout, compared_parts(config))
    most = config.reward.max_failure_share
    return Filters(built_in, own, max_failure_share=most, where=texts.prompts.where)


async def evaluation_of(
    given: EvalSet,
    texts: Texts,
    engine: Sampler,
    known: list[Scoring],
    opened: contextlib.AsyncExitStack,
    report: WorkerReport,
) -> Evaluate:
    """What scores chunks of one set.

    Args:
        known: environments and rewards that are there, of the training and of the sets before; one of these settings is
            shared, another is made and added.
        opened: closes what is made.

    Raises:
        ConfigError: as `make_environment` and `make_rewards`.
    """
    config = given.config
    environment = next((one.environment for one in known if one.environment_settings == config.environment), None)
    rewards = next((one.rewards for one in known if one.reward_settings == config.reward), None)
    if rewards is None:
        rewards = await opened.enter_async_context(make_rewards(config, of_set=given.name))
    if environment is None:
        environment = environment_of(config, texts)
        opened.push_async_callback(close_environment, environment)
    known.append(Scoring(config.environment, config.reward, environment, rewards))
    runner = make_runner(config, texts, engine, environment, rewards, report=report, watch=RewardWatch())
    rows = rows_in_order(given.source, config, texts.chat)
    try:
        sources = told_apart(rows.data_sources(), config.eval.rows)
    except DataError:  # told with the row, when it is evaluated
        sources = ()
    of_set = EvaluatedSet(
        rows=rows,
        sources=sources,
        sampling=replace(evaluation_sampling(texts, config.eval), max_new_tokens=config.rollout.max_new_tokens),
        samples=config.eval.samples,
        pass_score=config.eval.pass_score,
        answer=config.eval.answer,
        kept=spread(min(rows.rows, config.eval.rows), config.telemetry.samples_per_evaluation),
    )
    return partial(runner.run_evaluation, given=of_set)


def evaluation_sampling(texts: Texts, settings: EvalConfig) -> SamplingParams:
    """Return the sampling of evaluations, whose rows are not trained on."""
    return replace(
        texts.sampling,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        record_routing=False,
    )


def rows_in_order(source: Source, config: Config, chat: RendererChat) -> PromptSource:
    """Return the prompts of one source, in the order of the file."""
    return PromptSource(
        open_alone(source),
        chat,
        seed=0,
        shuffle=False,
        max_prompt_tokens=longest_drawn(config),
        overlong=config.data.overlong,
    )


def longest_drawn(config: Config) -> int | None:
    """The limit on prompts as they are drawn; None where the environment makes its first request itself (with tools, a
    system message, of other columns), which the runner then measures."""
    reads_tokens = config.environment.name == ENVIRONMENTS[0] or config.data.overlong.startswith("truncate_")
    return config.data.max_prompt_tokens if reads_tokens else None


def make_runner(
    config: Config,
    texts: Texts,
    engine: Sampler,
    environment: Environment,
    rewards: Rewards,
    *,
    report: WorkerReport,
    watch: RewardWatch,
) -> EpisodeRunner:
    """What makes episodes of prompts, of a worker and of an evaluation that stands alone."""
    return EpisodeRunner(
        engine=engine,
        environment=environment,
        decode=make_decode(texts.tokenizer, texts.chat.end_texts),
        encode=make_encode(texts.tokenizer),
        score=rewards.score,
        parts=RewardParts.of(
            config.advantage,
            texts.sampling,
            reference=config.reference.from_rollout,
            compared=config.rollout.zero_variance_of,
        ),
        stepped=lambda: report.count("environment_steps"),
        sampled=report.sampled,
        watch=watch,
        chat=texts.chat,
        timeout_s=config.environment.timeout_s,
        max_tokens=config.environment.max_tokens,
        max_prompt_tokens=config.data.max_prompt_tokens,
        overlong=config.data.overlong,
        accuracy=config.reward.metric == "accuracy",
    )


def _subscriber(config: Config, name: str, replay: RolloutClient, engine: Engine, copies: SameCopies) -> Subscriber:
    # The fake engine has no model: nothing to prove, nothing to hold names against.
    model_less = config.engine.name == "fake"
    return make_subscriber(
        config,
        copies,
        name,
        replay.incarnation,
        engine.load_weights,
        engine.receiver() if isinstance(engine, OwnProcesses) else None,
        score=None if model_less else engine.score,
        stall_s=lambda: engine.stats()["stall_s"],
        admit=None if model_less else expected_parameters(config.model.path).check,
        everywhere=engine.score_everywhere if isinstance(engine, Several) else None,
    )


def group_shape(rollout: RolloutConfig) -> GroupShape:
    return GroupShape(
        size=rollout.group_size,
        fewest=rollout.min_group_size or rollout.group_size,
        tries=rollout.max_attempts,
    )


def load_texts(config: Config, own: LocalTokenizer | None = None) -> Texts:
    """
    Args:
        own: see `load_tokenizer`.
    """
    tokenizer = load_tokenizer(config.model.path, own)
    vocabulary = MAX_VOCABULARY if config.engine.name == "fake" else check_vocabulary(config.model.path, tokenizer)
    chat = open_chat(tokenizer, config.model.path, config.model.renderer, config.model.chat)
    log.info("%s", told(chat, config.model.renderer))
    # Those of the model's files too: an environment would otherwise take a turn that ended with one for an open one.
    chat.stop_token_ids = stop_token_ids(config.model.path, tokenizer, chat.stop_token_ids)
    if end := described(chat.stop_token_ids, chat.stop_texts, chat.decode):
        log.info("%s", end)
    prompts = PromptSource(
        open_dataset(config.data),
        chat,
        seed=config.seed,
        shuffle=config.data.shuffle,
        max_prompt_tokens=longest_drawn(config),
        overlong=config.data.overlong,
        vocabulary=vocabulary,
    )
    sampling = SamplingParams(
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        min_p=config.rollout.min_p,
        max_new_tokens=config.rollout.max_new_tokens,
        stop_token_ids=chat.stop_token_ids,
        stop=chat.stop_texts,
        record_topk=config.engine.record_topk,
        record_routing=config.learner.router_replay,
    )
    return Texts(
        tokenizer=tokenizer,
        chat=chat,
        vocabulary=vocabulary,
        prompts=prompts,
        sampling=sampling,
    )
