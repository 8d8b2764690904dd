"""Router replay: the experts that the engine chose, from its routers to the learner's log-probs and gradients."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.hf.engine import TransformersEngine
from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.environments.transcript import Transcript
from asyncrl.errors import ConfigError, EpisodeError
from asyncrl.learner.batch.micro_batch import pack
from asyncrl.learner.model.layout import Layout, use_layout
from asyncrl.learner.model.policy import PolicyModel, build_model
from asyncrl.learner.model.routing import RouterReplay, _Router
from asyncrl.learner.optimizer.update import NonFiniteGuard
from asyncrl.learner.roles import build_roles
from asyncrl.learner.step.scoring import unrouted
from asyncrl.learner.step.step import train_step
from asyncrl.recorded import routed_tokens, routing_fault
from asyncrl.replay.codec.group import check_stored, encode_group, split_frames
from asyncrl.replay.protocol import Lease
from asyncrl.routers import Recorder, routers_of
from asyncrl.settings.loss.keys import LossConfig
from asyncrl.settings.loss.meaning import resolve
from asyncrl.types import (
    ROUTED_EXPERTS,
    Completion,
    Routers,
    SamplingParams,
    StepPlan,
    Trajectory,
    TrajectoryGroup,
)
from tests.learner.families import (
    drawn,
    logprobs_alone,
    routed,
    settings_for,
    siblings,
    tiny_family,
    trained_logprobs,
)
from tests.learner.feed import make_lease, make_step, tiny_checkpoint, tiny_model

CPU = torch.device("cpu")
FAMILIES = ["Qwen3-MoE", "Qwen2-MoE", "Mixtral", "GLM-4-MoE", "DeepSeek-V3"]


def policy_of(hf: PreTrainedModel, folder: Path, **changes: Any) -> PolicyModel:
    hf.save_pretrained(folder)
    config = settings_for(folder)
    model = build_model(replace(config, model=replace(config.model, **changes)), CPU, None)
    model.replay = RouterReplay(model, "model.path=here")
    return model


def gradients(hf: PreTrainedModel, logprobs: Tensor) -> Mapping[str, Tensor]:
    logprobs.square().sum().backward()
    return {name: each.grad for name, each in hf.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_transformers_with_the_recorded_experts(family: str, tmp_path: Path) -> None:
    hf = tiny_family(family)
    routers = routers_of(hf)
    batch = siblings(routers)
    model = policy_of(hf, tmp_path, activation_checkpointing=True)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, experts_implementation="eager")
    mine, theirs = trained_logprobs(model, batch), logprobs_alone(plain, batch)
    assert (mine - theirs).abs().max() < 1e-5
    own, wanted = gradients(model.hf, mine), gradients(plain, theirs)
    assert set(own) == set(wanted)
    for name, gradient in own.items():
        assert (gradient - wanted[name]).abs().max() < 1e-5 * max(1.0, float(wanted[name].abs().max())), name
    # The experts make a difference, and none where the router chooses for itself.
    free = trained_logprobs(model, unrouted(batch))
    assert (free - mine).abs().max() > 1e-2
    assert model.replay is not None
    changed, choices = model.replay.told() or (torch.zeros(()), torch.zeros(()))
    assert 0 < changed < choices


PROMPT = np.arange(3, 12, dtype=np.int32)
NEW, SIBLINGS = 12, 4


def sampled(folder: Path, dtype: torch.dtype, *, later: Mapping[str, Tensor] | None = None) -> list[Trajectory]:
    """Four siblings whose experts are recorded, beside one request that wants none; each with a second turn.

    Args:
        later: weights of version 1, which come while the first turn is sampled.
    """
    runner = ModelRunner.from_pretrained(str(folder), dtype, CPU, 16)
    weights = {name: each.clone() for name, each in runner.model.named_parameters()}
    engine = TransformersEngine(runner)

    async def generate(prompt: np.ndarray, n: int, seed: int, wanted: bool = True) -> list[Completion]:
        sampling = SamplingParams(temperature=1.0, max_new_tokens=NEW, record_routing=wanted)
        request = GenerateRequest(request_id=str(seed), prompt_ids=prompt, n=n, sampling=sampling, seed=seed)
        return await asyncio.wait_for(engine.generate(request), 90)

    async def episode(first: Completion, seed: int) -> Trajectory:
        transcript = Transcript(PROMPT)
        transcript.add_completion(first)
        transcript.add_observation([7, 8])
        (second,) = await generate(transcript.token_ids, 1, seed)
        transcript.add_completion(second)
        transcript.add_observation([9])
        return transcript.trajectory(1.0)

    async def work() -> list[Trajectory]:
        try:
            await asyncio.to_thread(engine.load_weights, 0, weights)
            asked = [generate(PROMPT, SIBLINGS, 0), generate(PROMPT[:5], 1, 1, wanted=False)]
            tasks = [asyncio.ensure_future(each) for each in asked]
            if later is not None:
                while engine.stats()["generated_tokens"] < 2 * SIBLINGS:  # waits for: the engine's thread
                    await asyncio.sleep(0.001)
                await asyncio.to_thread(engine.load_weights, 1, later)
            firsts, (without,) = await asyncio.wait_for(asyncio.gather(*tasks), 90)
            assert not without.recorded
            return [await episode(each, 10 + place) for place, each in enumerate(firsts)]
        finally:
            await engine.close()

    return asyncio.run(work())


def scored(model: PolicyModel, trajectories: list[Trajectory]) -> tuple[Tensor, Tensor, float]:
    """Gaps of the learner's log-probs to the engine's at each loss token, with replay and without, and the share of
    choices that the learner's routers would have made otherwise."""
    lease = leased_group(trajectories)
    batch = pack(lease, list(lease.trajectories), CPU, routers=model.routers)
    places = batch.loss_positions
    recorded = batch.behavior_logprobs[places]
    with_replay, without = (
        trained_logprobs(model, batch) - recorded,
        trained_logprobs(model, unrouted(batch)) - recorded,
    )
    assert model.replay is not None
    changed, choices = model.replay.told() or (torch.zeros(()), torch.ones(()))
    return with_replay.detach(), without.detach(), float(changed / choices)


def leased_group(trajectories: list[Trajectory]) -> Lease:
    """As a rank gets it."""
    group = TrajectoryGroup(group_id=0, prompt_index=0, attempt=0, worker="w", trajectories=tuple(trajectories))
    encoded = encode_group(group)
    stored = split_frames(encoded.header, encoded.frames)
    check_stored(encoded.header, stored, 1 << 20)
    members = tuple((0, place) for place in range(len(trajectories)))
    plan = StepPlan(
        step=0,
        policy_version=1,
        groups=(encoded.header,),
        staleness={0: 1, 1: 0},
        max_staleness=1,
        shards=(members,),
    )
    decoded = stored.trajectories(encoded.header.trajectories)
    return Lease(plan=plan, trajectories={member: decoded[member[1]] for member in members}, samples=())


def test_engine_and_learner_are_one_network_again_where_bfloat16_had_made_them_two(tmp_path: Path) -> None:
    """Prompts shared by siblings, turns after a first, other requests in the batch: with the same weights in float32
    hardly anything is chosen otherwise and the log-probs agree; in bfloat16 some is, and replay takes that out."""
    hf = tiny_model("qwen3_moe", num_hidden_layers=8, num_experts=16, num_experts_per_tok=4, initializer_range=0.1)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            parameter.mul_(8.0 if "experts.down_proj" in name else 1.0)  # or another expert would hardly be seen
    model = policy_of(hf, tmp_path)
    exact, _, changed = scored(model, sampled(tmp_path, torch.float32))
    assert exact.abs().max() < 1e-3 and changed < 0.01
    replayed, free, changed = scored(model, sampled(tmp_path, torch.bfloat16))
    assert len(replayed) == SIBLINGS * 2 * NEW
    assert 0.005 < changed < 0.5
    assert replayed.abs().mean() < 0.5 * free.abs().mean()


def test_a_token_keeps_the_experts_of_the_weights_that_sampled_what_follows_it(tmp_path: Path) -> None:
    """Weights change amid a generation, and a later turn's prompt is read by the new ones: what was chosen for the
    tokens of the first stays what it was."""
    hf = tiny_model("qwen3_moe", num_experts=16, num_experts_per_tok=4)
    model = policy_of(hf, tmp_path)
    other = tiny_model("qwen3_moe", seed=1, num_experts=16, num_experts_per_tok=4)
    later = {name: each.detach() for name, each in other.named_parameters()}
    assert model.routers is not None
    for trajectory in sampled(tmp_path, torch.float32, later=later):
        versions = trajectory.policy_versions[trajectory.loss_mask]
        assert set(versions.tolist()) == {0, 1}
        routed = trajectory.extras[ROUTED_EXPERTS]
        assert routed.shape == (routed_tokens(trajectory), 2, 4) and routed.dtype == np.uint8
        assert not routing_fault(trajectory, model.routers)
        # Under causal attention the first weights read these tokens now as they did then.
        before = len(PROMPT) + int((versions == 0).sum()) - 1
        recorder, told = Recorder(hf), []
        with torch.no_grad(), recorder.on(1, told):
            hf(input_ids=torch.from_numpy(trajectory.token_ids.astype(np.int64))[None])
        same = np.sort(told[0][: len(routed)], -1) == np.sort(routed, -1)
        assert same[:before].mean() > 0.9 and same[before:].mean() < 0.9


def test_a_trajectory_that_was_not_generated_from_all_of_itself_brings_none() -> None:
    def turn(tokens: int, rows: int) -> Completion:
        routed = np.zeros((rows, 1, 1), np.uint8)
        return Completion(
            token_ids=np.ones(tokens, np.int32),
            logprobs=np.zeros(tokens, np.float32),
            policy_versions=np.zeros(tokens, np.int32),
            finish_reason="stop",
            recorded={ROUTED_EXPERTS: routed},
        )

    for rows, kept in ((12, True), (9, False)):
        transcript = Transcript(PROMPT[:4])
        transcript.add_completion(turn(3, 6))
        transcript.add_observation([5])
        transcript.add_completion(turn(5, rows))
        made = transcript.trajectory(0.0)
        assert (ROUTED_EXPERTS in made.extras) == kept
        assert bool(routing_fault(made)) != kept


def test_what_cannot_follow_is_refused_in_words(tmp_path: Path) -> None:
    dense = build_model(settings_for(tiny_checkpoint(tmp_path / "dense")), CPU, None)
    with pytest.raises(
        ConfigError, match=r"model.path=x: learner.router_replay=true is for mixtures, and qwen2 has no"
    ):
        RouterReplay(dense, "model.path=x")
    mixture = policy_of(tiny_model("qwen3_moe"), tmp_path / "mixture")
    use_layout(mixture, Layout.ROWS)
    with pytest.raises(ConfigError, match="runs unpacked"):
        RouterReplay(mixture, "model.path=x")


@pytest.mark.parametrize("what", ["absent", "another layer", "beyond", "twice"])
def test_a_rank_refuses_what_no_router_can_have_chosen(what: str, tmp_path: Path) -> None:
    routers = Routers(layers=2, chosen=2, experts=6)
    plan, groups = make_step(3, groups=1, size=2, max_staleness=4)
    wrong = {}
    for each in groups[0].trajectories[:1]:
        good = drawn(routed_tokens(each), routers, np.random.default_rng(0))
        wrong = {
            "absent": {},
            "another layer": {ROUTED_EXPERTS: good[:, :1]},
            "beyond": {ROUTED_EXPERTS: good + np.uint8(6)},
            "twice": {ROUTED_EXPERTS: np.zeros_like(good)},
        }[what]
    made = [replace(groups[0], trajectories=tuple(replace(each, extras=wrong) for each in groups[0].trajectories))]
    with pytest.raises(
        EpisodeError, match=r"made by w0: extras.*routed_experts.*learner.router_replay=true needs them"
    ):
        pack(make_lease(plan, made), plan.shards[0], CPU, routers=routers)


def leased_siblings(routers: Routers | None) -> Lease:
    assert routers is not None
    plan, groups = make_step(3, groups=2, size=3, max_staleness=4)
    return make_lease(plan, [routed(group, routers, np.random.default_rng(group.group_id)) for group in groups])


@pytest.mark.parametrize(("lora", "average"), [(0, 0.5), (2, 0.0)])
def test_a_step_replays_in_every_pass_of_the_policy_and_its_average_and_not_in_the_reference_s(
    lora: int, average: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    config = replace(settings_for(tmp_path), loss=resolve(LossConfig(preset="decoupled_ppo", kl_coef=0.1)))
    config.model.lora_rank, config.learner.router_replay, config.learner.proximal_ema = lora, True, average
    seen: list[bool] = []
    choose = _Router.choose

    def noting(router: _Router, *given: Any) -> Any:
        seen.append(router.given is not None)
        return choose(router, *given)

    monkeypatch.setattr(_Router, "choose", noting)
    roles = build_roles(config, CPU, None)
    routers = roles.policy.routers
    assert routers == Routers(layers=2, chosen=2, experts=6)
    lease = leased_siblings(routers)
    seen.clear()
    row = train_step(config, roles, NonFiniteGuard(tmp_path, 0, 1), lease, rank=0).row()
    # Two layers of each: first the average scores the batch, or the policy without adapters, which is the reference.
    # A reference of its own has no router that could be told anything.
    assert seen[:4] == [bool(average)] * 2 + [True, True] and all(seen[4:])
    assert 0.2 < row["router/changed"] < 1
