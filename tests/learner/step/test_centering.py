"""Score centering from the engine to the gradient: what is recorded, its way to the learner, every split."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.hf.engine import TransformersEngine
from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.environments.transcript import Transcript
from asyncrl.errors import EpisodeError
from asyncrl.learner.batch.micro_batch import MicroBatch, pack
from asyncrl.learner.batch.plan import Budget, plan_minibatches
from asyncrl.learner.model.policy import PolicyModel, build_model
from asyncrl.learner.step.gradients import accumulate
from asyncrl.learner.step.scoring import score_with_topk
from asyncrl.learner.step.targets import with_targets
from asyncrl.losses import LossInputs, TopK, policy_loss, preset
from asyncrl.replay.protocol import Lease
from asyncrl.schema import Config, LearnerConfig, ModelConfig, RolloutConfig
from asyncrl.types import TOPK_IDS, TOPK_LOGPROBS, Completion, SamplingParams, Trajectory
from tests.learner.feed import VOCABULARY, gradient, make_lease, make_step, tiny_checkpoint

CPU = torch.device("cpu")
TEMPERATURE, K = 0.8, 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def config_of(model: Path, **loss: object) -> Config:
    return Config(
        model=ModelConfig(path=str(model)),
        rollout=RolloutConfig(temperature=TEMPERATURE),
        learner=LearnerConfig(max_tokens_per_microbatch=60),
        loss=preset("dis", band_low=0.2, band_high=3.0, centering=True, **loss),
    )


def sampled(folder: Path, *asked: SamplingParams) -> list[list[Completion]]:
    """Three completions of one prompt for each, all in one batch."""
    runner = ModelRunner.from_pretrained(str(folder), torch.float32, CPU, 16)
    weights = {name: parameter.clone() for name, parameter in runner.model.named_parameters()}
    engine = TransformersEngine(runner)

    async def work() -> list[list[Completion]]:
        requests = (
            GenerateRequest(request_id=str(n), prompt_ids=PROMPT, n=3, sampling=sampling, seed=n)
            for n, sampling in enumerate(asked)
        )
        try:
            await asyncio.to_thread(engine.load_weights, 0, weights)
            return await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests)), 90)
        finally:
            await engine.close()

    return asyncio.run(work())


PROMPT = np.arange(10, 15, dtype=np.int32)


@torch.no_grad()
def distributions(model: PreTrainedModel, completion: Completion) -> torch.Tensor:
    """[N, V] log-probs that each token was drawn from."""
    ids = torch.tensor(np.concatenate([PROMPT, completion.token_ids]))[None].long()
    logits = model(input_ids=ids, use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


def test_the_engine_records_the_likeliest_tokens_of_what_it_sampled_from(model: Path):
    ask = SamplingParams(temperature=TEMPERATURE, max_new_tokens=9)
    given = sampled(model, replace(ask, record_topk=K), ask, replace(ask, record_topk=VOCABULARY + 10))
    plain = AutoModelForCausalLM.from_pretrained(model)
    assert not any(completion.recorded for completion in given[1])
    for completions, k in ((given[0], K), (given[2], VOCABULARY)):
        for each in completions:
            ids, logprobs = each.recorded[TOPK_IDS], each.recorded[TOPK_LOGPROBS]
            assert ids.shape == logprobs.shape == (len(each.token_ids), k)
            assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
            values, _ = distributions(plain, each).topk(k)
            np.testing.assert_allclose(logprobs, values.numpy(), atol=1e-4)
            at, place = np.nonzero(ids == each.token_ids[:, None])
            np.testing.assert_allclose(logprobs[at, place], each.logprobs[at], atol=1e-6)
    transcript = Transcript(PROMPT)
    transcript.add_completion(given[0][0])
    transcript.add_observation(np.arange(3, dtype=np.int32))
    transcript.add_completion(given[0][1])
    extras = transcript.trajectory(1.0).extras
    assert len(extras[TOPK_IDS]) == len(given[0][0].token_ids) + len(given[0][1].token_ids)


def with_topk(trajectory: Trajectory, rng: np.random.Generator, k: int = K) -> Trajectory:
    """As an engine of other weights would have recorded them."""
    count = int(trajectory.loss_mask.sum())
    logits = rng.standard_normal((count, VOCABULARY))
    logprobs = torch.tensor(logits).log_softmax(-1).numpy()
    ids = np.argsort(-logprobs, axis=1)[:, :k]
    found = {TOPK_IDS: ids.astype(np.int32), TOPK_LOGPROBS: np.take_along_axis(logprobs, ids, 1).astype(np.float32)}
    return replace(trajectory, extras=found)


def make_step_with_topk(seed: int) -> Lease:
    plan, groups = make_step(seed, groups=4, size=4)
    rng = np.random.default_rng(seed)
    made = [replace(group, trajectories=tuple(with_topk(t, rng) for t in group.trajectories)) for group in groups]
    return make_lease(plan, made)


def by_hand(config: Config, model: PolicyModel, batch: MicroBatch) -> torch.Tensor:
    """The loss of the whole batch from whole rows of logits."""
    assert batch.advantages is not None and batch.topk_ids is not None and batch.topk_logprobs is not None
    hidden = model.hidden_states(batch.input_ids, batch.position_ids, batch.packing)
    logits = model.head(hidden[batch.predictors]) / TEMPERATURE
    table = logits.log_softmax(-1)
    chosen = table.gather(1, batch.input_ids[batch.loss_positions][:, None])[:, 0]
    inputs = LossInputs(
        learner_logprobs=torch.zeros(len(batch.input_ids)).index_copy(0, batch.loss_positions, chosen),
        behavior_logprobs=batch.behavior_logprobs,
        advantages=batch.advantages,
        loss_mask=batch.loss_mask,
        sequence_ids=batch.sequence_ids,
        topk=TopK(batch.loss_positions, table.gather(1, batch.topk_ids), batch.topk_logprobs),
    )
    return policy_loss(inputs, config.loss).loss


def test_the_gradient_of_several_micro_batches_is_that_of_whole_rows_of_logits(model: Path):
    config, lease = config_of(model), make_step_with_topk(4)
    found, plain, micro_batches = [], None, []
    for budget in (10_000, 60, 25):
        policy = build_model(config, CPU, None)
        (minibatch,) = plan_minibatches(
            lease.plan, rank=0, updates=1, budget=Budget(tokens=budget, attention=4 * budget)
        )
        batches = [pack(lease, members, CPU, topk=True) for members in minibatch.micro_batches]
        batches, _ = with_targets(lease.plan, batches, config.advantage, 0.0, CPU)
        if not found:
            by_hand(config, policy, batches[0]).backward()
            found.append(gradient(policy))
            policy.zero_grad()
            without = replace(config, loss=preset("dis", band_low=0.2, band_high=3.0))
            accumulate(without, policy, batches, minibatch.denominators)
            plain = gradient(policy)
            policy.zero_grad()
        _, measured = accumulate(config, policy, batches, minibatch.denominators)
        found.append(gradient(policy))
        micro_batches.append(len(batches))
    assert micro_batches[0] == 1 < micro_batches[1] < micro_batches[2]
    assert plain is not None and (plain - found[0]).norm() > 0.05 * found[0].norm() > 0
    for other in found[1:]:
        torch.testing.assert_close(other / found[0].norm(), found[0] / found[0].norm(), atol=1e-5, rtol=0)
    row = measured.row()
    assert row["centering/removed"] > 0 and 0 < row["centering/covered"] < 1


def test_a_rank_without_trajectories_joins_and_one_without_the_likeliest_tokens_is_named(model: Path):
    config, lease = config_of(model), make_step_with_topk(4)
    policy = build_model(config, CPU, None)
    empty = pack(lease, (), CPU, topk=True)
    logprobs, _, topk = score_with_topk(config, policy, empty)
    assert topk is not None and len(topk.places) == 0 and logprobs.requires_grad
    plan, groups = make_step(4, groups=4, size=4)
    with pytest.raises(EpisodeError, match=r"extras has no 'topk_ids'.*engine\.record_topk"):
        pack(make_lease(plan, groups), plan.shards[0][:2], CPU, topk=True)
