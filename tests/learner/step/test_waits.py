"""How often a step waits for the device, measured on one that counts (`tests.far_device`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.learner.optimizer.update import NonFiniteGuard, make_optimizer
from asyncrl.learner.roles import Critic, Roles, build_roles
from asyncrl.learner.step.metrics import Measured
from asyncrl.learner.step.step import train_step
from asyncrl.losses import PRESETS
from asyncrl.replay.protocol import Lease
from asyncrl.schema import AdvantageConfig, Config, LearnerConfig, ModelConfig
from asyncrl.settings.loss.keys import LossConfig
from asyncrl.settings.loss.meaning import ESTIMATORS
from asyncrl.sft.step import sft_step
from asyncrl.types import SUPPORT_BITS, SUPPORT_COUNTS, SUPPORT_IDS, Trajectory
from tests.far_device import FAR, FarDevice, take_far
from tests.learner.feed import VOCABULARY, make_lease, make_step, tiny_checkpoint

Step = Callable[..., Measured]
CPU = torch.device("cpu")
COUNT = 4
"""Micro-batches: one for each trajectory of `lease_of`."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(autouse=True)
def fused_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW's one call is for devices that torch lists."""
    monkeypatch.setattr(
        import_module("torch.optim.optimizer"), "_get_fused_kernels_supported_devices", lambda: ["cpu", FAR.type]
    )


def config_of(model: Path, preset: str = "grpo", **changes: Any) -> Config:
    learner = {"updates_per_batch": 1, "max_tokens_per_microbatch": 1} | changes.pop("learner", {})
    return Config(
        model=ModelConfig(path=str(model)),
        loss=LossConfig(preset=preset, **changes.pop("loss", {})),
        advantage=AdvantageConfig(**changes.pop("advantage", {})),
        learner=LearnerConfig(**learner),
    )


def lease_of(*, truncated: bool = False) -> Lease:
    lease = make_lease(*make_step(0, groups=2, size=3, max_staleness=2))
    assert len(lease.trajectories) == COUNT
    rng = np.random.default_rng(0)
    made = {member: narrowed(each, rng) if truncated else each for member, each in lease.trajectories.items()}
    return replace(lease, trajectories=made)


def narrowed(trajectory: Trajectory, rng: np.random.Generator) -> Trajectory:
    """Some of its tokens drawn from a few tokens, some from half of all, some from all."""
    sampled = trajectory.token_ids[trajectory.loss_mask]
    counts, ids, bits = np.zeros(len(sampled), np.int32), [], []
    for place, token in enumerate(sampled):
        inside = rng.random(VOCABULARY) < 0.5
        inside[token] = True
        if place % 3 == 0:
            listed = np.union1d(rng.integers(0, VOCABULARY, 4), [token])
            counts[place] = len(listed)
            ids.append(listed)
        elif place % 3 == 1:
            counts[place] = -int(inside.sum())
            bits.append(np.packbits(inside, bitorder="little"))
    extras = {
        SUPPORT_COUNTS: counts,
        SUPPORT_IDS: np.concatenate([np.zeros(0), *ids]).astype(np.int32),
        SUPPORT_BITS: np.stack(bits) if bits else np.zeros((0, 0), np.uint8),
    }
    return replace(trajectory, extras={**trajectory.extras, **extras})


def stepped(config: Config, folder: Path, lease: Lease, device: torch.device, step: Step) -> tuple[Roles, Measured]:
    """One step of new models."""
    roles, guard = build_roles(config, CPU, None), NonFiniteGuard(folder / "nonfinite", 0, 0)
    if device == FAR:
        for each in roles.models():
            take_far(each)
        roles.optimizer = make_optimizer(roles.policy.parameters(), config.learner)
        if roles.critic is not None:
            optimizer = make_optimizer(roles.critic.model.parameters(), config.learner)
            roles.critic = Critic(model=roles.critic.model, optimizer=optimizer)
    return roles, step(config, roles, guard, lease, rank=0)


def waited(config: Config, folder: Path, lease: Lease, step: Step = train_step) -> list[str]:
    """What a step waited for, which came out as on the CPU."""
    near, row = stepped(config, folder, lease, CPU, step)
    with FarDevice() as device:
        far, found = stepped(config, folder, lease, FAR, step)
        waits = list(device.waits)
        weights = [each.detach().cpu() for each in far.policy.parameters()]
    assert found.row() == pytest.approx(row.row(), rel=1e-3, abs=1e-4)
    assert found.row()["optim/grad_norm"] > 0
    for mine, theirs in zip(weights, near.policy.parameters(), strict=True):
        # AdamW's first step is as long for a gradient that rounding alone makes as for any other.
        assert (mine - theirs).abs().max() <= 2.1 * config.learner.lr
    return waits


MOST = 6
"""Waits of a step, whatever the loss, unless it needs a statistic of all tokens, which waits for each micro-batch."""
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "one update": ({}, 2, 0),
    "two updates": ({"learner": {"updates_per_batch": 2}}, 4, 0),
    "by turn and prompt": ({"loss": {"level": "segment", "aggregation": "prompt_mean"}}, 2, 0),
    "critic, kl in the reward": ({"preset": "ppo", "advantage": {"estimator": "gae", "kl_coef": 0.1}}, 4, 0),
    "rate by effective samples": ({"preset": "vcpo"}, 3, 0),
    "kept tokens divide": ({"preset": "geo_rs", "loss": {"weight_low": 0.01, "weight_high": 1.5}}, 4, 0),
    "a quantile of all": ({"loss": {"sat_quantile": 0.9, "edge": "E"}}, 5, 1),
}
"""Settings, then waits of a step for all its micro-batches together, and for each of them."""


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_the_device_at_its_end_and_not_for_each_micro_batch(name: str, model: Path, tmp_path: Path):
    changes, whole, each = CASES[name]
    waits = waited(config_of(model, **changes), tmp_path, lease_of())
    assert len(waits) <= whole + COUNT * each, waits


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_no_loss_waits_for_each_micro_batch(preset: str, model: Path, tmp_path: Path):
    estimator, baseline = ESTIMATORS.get(preset, ("group", "mean"))
    advantage = {"estimator": estimator, "baseline": baseline, "std": "batch" if preset == "reinforce_pp" else "none"}
    with FarDevice() as device:
        stepped(config_of(model, preset, advantage=advantage), tmp_path, lease_of(), FAR, train_step)
    assert len(device.waits) <= MOST + COUNT * PRESETS[preset].batch_statistic, device.waits


def test_tokens_drawn_from_some_of_all_cost_no_wait(model: Path, tmp_path: Path):
    assert len(waited(config_of(model), tmp_path, lease_of(truncated=True))) <= 2


def test_a_step_on_rows_waits_at_its_end_and_not_for_each_micro_batch(model: Path, tmp_path: Path):
    assert len(waited(config_of(model), tmp_path, lease_of(), sft_step)) <= 2


def test_the_counting_device_counts_and_refuses_what_a_gpu_would():
    with FarDevice() as device:
        far = torch.arange(6).to(FAR, non_blocking=True)
        twice = (far * 2 + torch.tensor(1))[1:4]
        assert device.waits == []
        assert twice.tolist() == [3, 5, 7] and int(far.sum()) == 15 and bool((far > 2).any())
        assert far[far > 3].cpu().tolist() == [4, 5]
        torch.arange(3).to(FAR)
        assert len(device.waits) == 6, "three numbers, a shape, a copy to the host, a copy from it"
        with pytest.raises(RuntimeError, match="two devices"):
            far.add(torch.arange(6))
