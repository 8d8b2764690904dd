"""Truncated sampling from the engine to the learner's ratios: the built-in engine, transcripts, the wire, packing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.hf.engine import TransformersEngine
from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.environments.transcript import Transcript
from asyncrl.learner.batch.micro_batch import MicroBatch, pack
from asyncrl.learner.model.policy import PolicyModel, build_model
from asyncrl.learner.step.scoring import score
from asyncrl.recorded import SUPPORT, support_fault
from asyncrl.replay.codec.columns import join
from asyncrl.replay.codec.extras import join_extras
from asyncrl.replay.codec.group import StoredGroup, group_header
from asyncrl.replay.protocol import Lease
from asyncrl.schema import Config, ModelConfig, RolloutConfig
from asyncrl.types import Completion, SamplingParams, StepPlan, Trajectory, TrajectoryGroup
from tests.learner.feed import VOCABULARY, tiny_checkpoint

CPU = torch.device("cpu")
TEMPERATURE = 0.8
TOP_P = {"top_p": 0.9}
CUTS = [TOP_P, {"top_k": 6}, {"min_p": 0.05}, {"top_p": 0.8, "top_k": 40, "min_p": 0.01}]
GROUPS, SIBLINGS, NEW = 4, 12, 16


def sampled(folder: Path, *cuts: dict[str, float], new: int = NEW) -> list[list[Completion]]:
    """Of each prompt the completions, all in one batch; `cuts` by prompt."""
    runner = ModelRunner.from_pretrained(str(folder), torch.float32, CPU, 128)
    weights = {name: parameter.clone() for name, parameter in runner.model.named_parameters()}
    engine = TransformersEngine(runner)

    async def work() -> list[list[Completion]]:
        asked = (
            GenerateRequest(
                request_id=str(place),
                prompt_ids=prompt(place),
                n=SIBLINGS,
                sampling=SamplingParams(temperature=TEMPERATURE, max_new_tokens=new, **cut),  # pyright: ignore[reportArgumentType]
                seed=place,
            )
            for place, cut in enumerate(cuts)
        )
        try:
            await asyncio.to_thread(engine.load_weights, 0, weights)
            return await asyncio.wait_for(asyncio.gather(*map(engine.generate, asked)), 90)
        finally:
            await engine.close()

    return asyncio.run(work())


def prompt(place: int) -> np.ndarray:
    return np.arange(10 + place, 14 + 2 * place, dtype=np.int32)


def made_of(place: int, completion: Completion) -> Trajectory:
    transcript = Transcript(prompt(place))
    transcript.add_completion(completion)
    return transcript.trajectory(1.0)


def leased(groups: list[list[Completion]]) -> Lease:
    """As a rank gets them: over the wire, read-only."""
    made = [
        TrajectoryGroup(
            group_id=place,
            prompt_index=place,
            attempt=0,
            worker="w",
            trajectories=tuple(made_of(place, completion) for completion in completions),
        )
        for place, completions in enumerate(groups)
    ]
    headers = tuple(group_header(group) for group in made)
    stored = [
        StoredGroup(
            b"", join(group.trajectories, facts.trajectories), join_extras(group.trajectories, facts.trajectories)
        )
        for group, facts in zip(made, headers, strict=True)
    ]
    members = [(g, t) for g, group in enumerate(made) for t in range(len(group.trajectories))]
    plan = StepPlan(
        step=0, policy_version=0, groups=headers, staleness={0: 0}, max_staleness=0, shards=(tuple(members),)
    )
    decoded = [group.trajectories(facts.trajectories) for group, facts in zip(stored, headers, strict=True)]
    return Lease(plan=plan, trajectories={(g, t): decoded[g][t] for g, t in members}, samples=())


def policy_of(folder: Path) -> tuple[Config, PolicyModel]:
    config = Config(model=ModelConfig(path=str(folder)), rollout=RolloutConfig(temperature=TEMPERATURE))
    return config, build_model(config, CPU, None)


def ratios(config: Config, policy: PolicyModel, batch: MicroBatch) -> np.ndarray:
    """Learner over behavior at each loss token: the same weights, so 1."""
    with torch.no_grad():
        logprobs, _ = score(config, policy, batch)
    return (logprobs - batch.behavior_logprobs)[batch.loss_positions].double().exp().numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), initializer_range=0.12)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_ratio_is_one_with_the_support_and_biased_without_it(folder: Path, cut: dict[str, float]) -> None:
    lease = leased(sampled(folder, *[cut] * GROUPS))
    config, policy = policy_of(folder)
    batch = pack(lease, list(lease.trajectories), CPU)
    found = ratios(config, policy, batch)
    assert abs(found.mean() - 1) < 1e-6 and abs(found - 1).max() < 1e-4
    # What the learner would have computed: a whole distribution over a part. Its mean is the mass of the support.
    blind = ratios(config, policy, replace(batch, support=None))
    assert blind.mean() < 0.95 and (blind < 1 + 1e-4).all()


def test_packing_splits_and_over_age_tokens_change_no_token_s_log_prob(folder: Path) -> None:
    """A prompt is shared by siblings; a trajectory of the whole vocabulary is among those of a part."""
    completions = sampled(folder, TOP_P, {}, TOP_P, {"top_k": 3})
    lease = leased(completions)
    config, policy = policy_of(folder)
    members = list(lease.trajectories)
    order = np.random.default_rng(0).permutation(len(members))
    for part in np.array_split(order, 5):
        batch = pack(lease, [members[place] for place in part], CPU)
        assert abs(ratios(config, policy, batch) - 1).max() < 1e-4
    aged = replace(lease.trajectories[0, 0], policy_versions=lease.trajectories[0, 0].policy_versions.copy())
    aged.policy_versions[len(prompt(0)) : len(prompt(0)) + 7] = 5
    first = lease.plan.groups[0]
    headers = (replace(first.trajectories[0], version_tokens=((5, 7), (0, NEW - 7))), *first.trajectories[1:])
    plan = replace(
        lease.plan,
        groups=(replace(first, trajectories=headers), *lease.plan.groups[1:]),
        staleness={0: 0, 5: 1},
    )
    stale = Lease(plan=plan, trajectories={**lease.trajectories, (0, 0): aged}, samples=())
    batch = pack(stale, [(0, 0), (1, 0), (0, 1)], CPU)
    assert len(batch.loss_positions) == 3 * NEW - 7
    assert abs(ratios(config, policy, batch) - 1).max() < 1e-4


def test_gradients_are_those_of_the_plain_log_probs_over_the_support(folder: Path) -> None:
    """Of the whole model, against transformers alone in float64: each sequence by itself, no chunk, no packing."""
    lease = leased(sampled(folder, TOP_P, {"top_k": 6}, new=6))
    config, policy = policy_of(folder)
    members = [(0, 0), (1, 3), (0, 5)]
    batch = pack(lease, members, CPU)
    logprobs, _ = score(config, policy, batch)
    logprobs[batch.loss_positions].square().sum().backward()
    mine = {name: parameter.grad for name, parameter in policy.hf.named_parameters()}
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for member in members:
        trajectory = lease.trajectories[member]
        alone = pack(Lease(plan=lease.plan, trajectories={member: trajectory}, samples=()), [member], CPU)
        ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
        logits = plain(input_ids=ids[None], use_cache=False).logits[0] / TEMPERATURE
        assert alone.support is not None
        places = np.flatnonzero(trajectory.loss_mask)
        for row, place in enumerate(places):
            inside = alone.support.narrow(torch.zeros(1, VOCABULARY), slice(row, row + 1))[0] == 0
            narrowed = logits[place - 1].masked_fill(~inside, -torch.inf).log_softmax(-1)
            total = total + narrowed[ids[place]].square()
    total.backward()
    for name, parameter in plain.named_parameters():
        theirs, own = parameter.grad, mine[name]
        assert theirs is not None and own is not None
        apart = float((own - theirs).abs().max()) / float(theirs.abs().max())
        assert apart < 1e-4, name


def test_a_row_of_the_whole_vocabulary_is_sampled_as_without_its_truncated_batch_mates(folder: Path) -> None:
    mixed = sampled(folder, {}, TOP_P, {"top_k": 1})
    (alone,) = sampled(folder, {})
    for one, other in zip(mixed[0], alone, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids) and not one.recorded
    assert all(set(completion.recorded) == set(SUPPORT) for completion in mixed[1])
    assert all((completion.logprobs == 0).all() for completion in mixed[2])  # one token is all there is


def test_turns_are_joined_and_what_is_no_support_is_found(folder: Path) -> None:
    (wide, *_), (whole, *_), (few, *_) = sampled(folder, TOP_P, {}, {"top_k": 6})
    transcript = Transcript(prompt(0))
    transcript.add_completion(wide)
    transcript.add_observation([7, 8])
    transcript.add_completion(few)
    good = transcript.trajectory(0.0, extras={"mine": np.zeros(3)})
    assert set(good.extras) == {*SUPPORT, "mine"}
    assert support_fault(good, VOCABULARY) == support_fault(good) == ""
    transcript.add_completion(whole)
    assert "has no support_counts" in support_fault(transcript.trajectory(0.0))

    def changed(name: str, array: np.ndarray) -> str:
        return support_fault(replace(good, extras={**good.extras, name: array}), VOCABULARY)

    counts, ids, bits = (good.extras[name] for name in SUPPORT)
    assert (counts[:NEW] < 0).all() and (counts[NEW:] == 6).all()
    assert "must be int32[32]" in changed(SUPPORT[0], counts[1:])
    assert "must be int32[96]" in changed(SUPPORT[1], ids[:-1])
    assert "ids of the vocabulary of 264" in changed(SUPPORT[1], ids + np.int32(VOCABULARY))
    assert "must have 33 bytes" in changed(SUPPORT[2], np.pad(bits, ((0, 0), (0, 1))))
    for name, array in ((SUPPORT[2], ~bits), (SUPPORT[1], (ids + 1) % VOCABULARY)):
        assert "not among the tokens" in changed(name, array)
