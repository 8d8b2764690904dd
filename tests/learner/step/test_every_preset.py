"""Every named loss in the learner's own step: what it trains on, reports and changes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from asyncrl.config import config_dir
from asyncrl.learner.batch.micro_batch import MicroBatch, pack
from asyncrl.learner.optimizer.update import NonFiniteGuard
from asyncrl.learner.roles import Roles, build_roles
from asyncrl.learner.step.metrics import plan_metrics
from asyncrl.learner.step.scoring import score, with_scores
from asyncrl.learner.step.step import train_step
from asyncrl.learner.step.targets import with_targets
from asyncrl.losses import PRESETS, LossInputs, policy_loss
from asyncrl.replay.protocol import Lease
from asyncrl.schema import AdvantageConfig, Config, LearnerConfig, ModelConfig
from asyncrl.settings.loss.keys import LossConfig
from asyncrl.settings.loss.meaning import ESTIMATORS, find_preset, proximal_source, resolve
from tests.learner.feed import make_lease, make_step, tiny_checkpoint, turned_step

CPU = torch.device("cpu")
SHAPED_WITHOUT_A_CUT = {"reinforce", "sapo", "vespo", "drpo", "dro"}
"""Surrogates that hold no token back."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def config_of(preset: str, model: Path) -> Config:
    estimator, baseline = ESTIMATORS.get(preset, ("group", "mean"))
    std = "batch" if estimator == "reinforce_pp" else "none"
    config = Config(
        model=ModelConfig(path=str(model)),
        loss=LossConfig(preset=preset),
        advantage=AdvantageConfig(estimator=estimator, baseline=baseline, std=std),
        learner=LearnerConfig(steps=2, lr=1e-3, groups_per_step=4, max_tokens_per_microbatch=10_000),
    )
    if preset == "decoupled_ppo":
        config.learner.updates_per_batch = 2  # its clip is on the edge U, which a second update must open
    if preset == "geo_rs":
        config.loss.weight_low, config.loss.weight_high = 0.01, 1.5  # random weights are far outside its own band
    return config


def lease_of(step: int) -> Lease:
    return make_lease(*make_step(step, step=step))


def train(config: Config, roles: Roles, lease: Lease, folder: Path) -> dict[str, float]:
    measured = train_step(config, roles, NonFiniteGuard(folder, 0, 1), lease, rank=0)
    return measured.row() | plan_metrics(lease.plan)


def whole_batch(config: Config, roles: Roles, lease: Lease) -> MicroBatch:
    """The lease as one micro-batch with its advantages."""
    members = sorted(place for shard in lease.plan.shards for place in shard)
    scored = with_scores(config, roles, [pack(lease, members, CPU)])
    ((batch,), _) = with_targets(lease.plan, scored, config.advantage, 0.0, CPU)
    return batch


@torch.no_grad()
def loss_by_hand(config: Config, roles: Roles, lease: Lease) -> float:
    """`policy_loss` of the whole batch, given all that it could want."""
    batch = whole_batch(config, roles, lease)
    assert batch.advantages is not None
    logprobs, _ = score(config, roles.policy, batch)
    anchored = proximal_source(config.loss, 1) == "current"
    inputs = LossInputs(
        learner_logprobs=logprobs,
        behavior_logprobs=batch.behavior_logprobs,
        advantages=batch.advantages,
        loss_mask=batch.loss_mask,
        sequence_ids=batch.sequence_ids,
        group_ids=batch.group_ids,
        proximal_logprobs=logprobs if anchored else None,
        staleness=batch.staleness,
    )
    return float(policy_loss(inputs, config.loss).loss)


def own_metrics(preset: str) -> set[str]:
    row, settings = find_preset(preset), resolve(LossConfig(preset=preset))
    names = {"loss/policy", "advantage/std", "kl/behavior", "ratio/E/ess_seq", "policy/entropy", "rewards/short"}
    if row.surrogate not in SHAPED_WITHOUT_A_CUT:
        names |= {"policy/clip_fraction"}
    if settings.weight != "none":
        names |= {"policy/weight_high", "policy/weight_high_positive"}
    if row.anchor != "none" or proximal_source(settings, 1) != "none":
        names |= {"ratio/B/rms_log_ratio", "ratio/U/rms_log_ratio"}
    own = {
        "opsm": {"policy/rejected_opsm"},
        "m2po_areal": {"policy/rejected_m2"},
        "ipo": {"loss/behavior_kl"},
        "vtrace": {"critic/loss", "critic/explained_variance"},
        "remax": {"rewards/greedy_baseline"},
    }
    return names | own.get(preset, set())


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains_on_its_own_loss_and_reports_its_own_numbers(preset: str, model: Path, tmp_path: Path):
    config = config_of(preset, model)
    roles = build_roles(config, CPU, None)
    before = [parameter.detach().clone() for parameter in roles.policy.parameters()]
    expected = loss_by_hand(config, roles, lease_of(0))
    first, second = (train(config, roles, lease_of(step), tmp_path) for step in (0, 1))
    if config.learner.updates_per_batch == 1:
        assert first["loss/total"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for row in (first, second):
        assert own_metrics(preset) <= row.keys()
        assert all(math.isfinite(value) for value in row.values())
        assert row["optim/nonfinite_steps"] == 0 < row["optim/grad_norm"]
    assert (first["optim/lr"] < config.learner.lr) == (preset == "vcpo")
    moved = [not torch.equal(old, new) for old, new in zip(before, roles.policy.parameters(), strict=True)]
    assert all(moved)


def test_the_anchor_of_a3po_follows_the_age_of_each_token(model: Path, tmp_path: Path):
    config = config_of("a3po", model)
    roles, lease = build_roles(config, CPU, None), lease_of(0)
    batch = whole_batch(config, roles, lease)
    with torch.no_grad():
        current, _ = score(config, roles.policy, batch)
    gap = (current - batch.behavior_logprobs)[batch.loss_mask].double()
    age = batch.staleness[batch.loss_mask]
    assert set(age.tolist()) == {0, 1, 2}
    expected = (gap / age.clamp(min=1)).square().mean().sqrt()
    row = train(config, roles, lease, tmp_path)
    assert row["ratio/U/rms_log_ratio"] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("preset", ["m2po_paper", "m2po_release", "m2po_areal"])
def test_a_wider_bound_on_the_second_moment_holds_fewer_tokens_back(preset: str, model: Path, tmp_path: Path):
    held = []
    for bound in (0.01, 100.0):
        config = config_of(preset, model)
        config.loss = LossConfig(preset=preset, m2_tau=bound)
        row = train(config, build_roles(config, CPU, None), lease_of(0), tmp_path)
        held.append(row["policy/rejected_m2" if preset == "m2po_areal" else "policy/clip_fraction"])
    assert held[0] > 0.0 == held[1]


@pytest.mark.parametrize("file", sorted((config_dir() / "advantage").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_shipped_advantage_trains(file: Path, model: Path, tmp_path: Path):
    settings = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(settings, dict)
    config = config_of("vtrace" if file.stem == "vtrace" else "dppo_tv", model)
    config.advantage = AdvantageConfig(**{str(key): value for key, value in settings.items()})
    if file.stem == "gdpo":
        config.advantage.components = {"short": 1.0}
    if file.stem == "custom":
        (tmp_path / "mine.py").write_text("def advantages(inputs): return inputs.rewards - inputs.rewards.mean()\n")
        config.advantage.function = f"{tmp_path}/mine.py:advantages"
    lease = lease_of(0) if not config.advantage.credits_turns else turned_step(0)
    row = train(config, build_roles(config, CPU, None), lease, tmp_path)
    assert all(math.isfinite(value) for value in row.values())
    assert row["advantage/std"] > 0 and row["optim/grad_norm"] > 0
    assert ("critic/loss" in row) == config.advantage.uses_critic
