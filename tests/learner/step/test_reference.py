"""The reference's log-probs, when they come with the trajectories in place of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import EpisodeError
from asyncrl.learner.batch.micro_batch import pack
from asyncrl.learner.checkpoints.checkpoint import Checkpoints
from asyncrl.learner.checkpoints.resume import begin
from asyncrl.learner.optimizer.update import NonFiniteGuard
from asyncrl.learner.roles import Roles, build_roles
from asyncrl.learner.step.step import train_step
from asyncrl.replay.protocol import Lease
from asyncrl.schema import AdvantageConfig, Config, LearnerConfig, ModelConfig, ReferenceConfig
from asyncrl.settings.loss.keys import LossConfig
from asyncrl.types import REF_LOGPROBS, Trajectory
from tests.learner.fed_replay import FedReplay
from tests.learner.feed import make_lease, make_step, tiny_checkpoint, tiny_model

CPU = torch.device("cpu")
REFERENCE_SEED = 5
CASES: dict[str, tuple[LossConfig, AdvantageConfig, int]] = {
    "in the reward, by turns": (
        LossConfig(preset="ppo"),
        AdvantageConfig(estimator="retrace_turns", baseline="none", kl_coef=0.1),
        0,
    ),
    "in both, with adapters": (LossConfig(preset="grpo", kl="k3", kl_coef=0.1), AdvantageConfig(kl_coef=0.05), 4),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of the policy, and of the reference."""
    root = tmp_path_factory.mktemp("models")
    return tiny_checkpoint(root / "policy"), tiny_checkpoint(root / "reference", seed=REFERENCE_SEED)


@torch.no_grad()
def taught(reference: torch.nn.Module, trajectory: Trajectory) -> Trajectory:
    """With the reference's log-probs of its sampled tokens, and NaN at the others."""
    ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
    logprobs = reference(input_ids=ids[None, :-1]).logits[0].log_softmax(-1)
    given = np.full(len(ids), np.nan, np.float32)
    given[1:] = logprobs.gather(-1, ids[1:, None])[:, 0].numpy()
    given[~trajectory.loss_mask] = np.nan
    return replace(trajectory, extras={REF_LOGPROBS: given})


def lease_of(reference: torch.nn.Module) -> Lease:
    lease = make_lease(*make_step(0, groups=2, size=3, observed=True))
    return replace(lease, trajectories={place: taught(reference, one) for place, one in lease.trajectories.items()})


@pytest.fixture(scope="module")
def lease() -> Lease:
    return lease_of(tiny_model(seed=REFERENCE_SEED).eval())


def train(config: Config, lease: Lease, folder: Path) -> tuple[Roles, dict[str, float], dict[str, torch.Tensor]]:
    roles = build_roles(config, CPU, None)
    row = train_step(config, roles, NonFiniteGuard(folder, 0, 1), lease, rank=0).row()
    return roles, row, {name: p.detach().clone() for name, p in roles.policy.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_what_came_along_trains_as_the_model_would(
    case: str, models: tuple[Path, Path], lease: Lease, tmp_path: Path
) -> None:
    loss, advantage, rank = CASES[case]
    config = Config(
        model=ModelConfig(path=str(models[0]), lora_rank=rank),
        loss=loss,
        advantage=advantage,
        reference=ReferenceConfig(path=str(models[1])),
        learner=LearnerConfig(steps=2, lr=1e-3, groups_per_step=2, updates_per_batch=2, max_tokens_per_microbatch=40),
    )
    with_model, expected, moved = train(config, lease, tmp_path)
    config.reference.path = "rollout"
    without, row, weights = train(config, lease, tmp_path)
    assert with_model.reference is not None
    assert without.reference is None and not without.base_is_reference
    names = {name for name in expected if name in ("kl/reference", "kl/in_reward")}
    assert "kl/in_reward" in names
    assert {name: row[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-3)
    assert all(abs(row[name]) > 0.01 for name in names)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, moved[name], atol=2e-4, rtol=1e-3)


def damaged(one: Trajectory, changes: dict[str, Any]) -> Trajectory:
    given = one.extras[REF_LOGPROBS].copy()
    sampled = np.flatnonzero(one.loss_mask)[-1]
    given[sampled] = changes.get("value", given[sampled])
    given = given.astype(changes.get("dtype", np.float32))[: changes.get("length")]
    return replace(one, extras={changes.get("name", REF_LOGPROBS): given})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "teacher"}, "extras has no 'ref_logprobs'"),
        ({"dtype": np.float64}, r"must be float32\[\d+\]; got float64"),
        ({"length": 2}, r"must be float32\[\d+\]; got float32\[2\]"),
        ({"value": np.nan}, "must be finite and not above 0"),
        ({"value": -np.inf}, "must be finite and not above 0"),
        ({"value": 0.1}, "must be finite and not above 0"),
    ],
)
def test_a_trajectory_without_them_ends_training_and_names_its_maker(
    lease: Lease, changes: dict[str, Any], says: str
) -> None:
    place, one = next(iter(lease.trajectories.items()))
    lease = replace(lease, trajectories={place: damaged(one, changes)})
    with pytest.raises(EpisodeError, match=says) as raised:
        pack(lease, [place], CPU, reference=True)
    group = lease.plan.groups[place[0]]
    for part in (f"group {group.group_id}, made by w0", "reference.path=rollout", "reference.path=MODEL"):
        assert part in str(raised.value)
    pack(lease, [place], CPU)


def test_tokens_outside_the_loss_carry_none_and_neither_does_an_empty_batch(lease: Lease) -> None:
    batch = pack(lease, list(lease.trajectories), CPU, reference=True)
    assert batch.ref_logprobs is not None
    assert batch.ref_logprobs[~batch.loss_mask].eq(0).all() and batch.ref_logprobs[batch.loss_mask].lt(0).all()
    empty = pack(lease, (), CPU, reference=True).ref_logprobs
    assert empty is not None and empty.tolist() == [0.0]


@pytest.mark.parametrize(("path", "announced"), [("rollout", "rollout"), ("", "")])
def test_the_replay_is_told_whether_groups_without_them_are_of_use(
    path: str, announced: str, models: tuple[Path, Path], tmp_path: Path
) -> None:
    config = Config(
        model=ModelConfig(path=str(models[0])),
        advantage=AdvantageConfig(kl_coef=0.1),
        reference=ReferenceConfig(path=path),
    )
    replay, checkpoints = FedReplay(), Checkpoints(tmp_path, rank=0, keep=1)
    begin(replay, checkpoints, build_roles(config, CPU, None), None, rank=0, device=CPU)
    (values,) = replay.named("announce")
    assert values["reference"] == announced and values["vocabulary"] > 0
