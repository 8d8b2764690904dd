"""Updates skipped for a gradient far above the previous ones, and gradient statistics of single tokens."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.errors import NonFiniteError
from asyncrl.learner.batch.micro_batch import pack
from asyncrl.learner.batch.plan import Budget, plan_minibatches
from asyncrl.learner.optimizer import spikes as spikes_module
from asyncrl.learner.optimizer.spikes import LEAST, WINDOW, Spikes
from asyncrl.learner.optimizer.update import NonFiniteGuard, UpdateReport, apply_update
from asyncrl.learner.roles import build_roles
from asyncrl.learner.step.gradients import accumulate, loss_inputs
from asyncrl.learner.step.targets import with_targets
from asyncrl.losses import LossConfig
from asyncrl.schema import Config
from tests.learner.fed_replay import FedReplay
from tests.learner.feed import gradient, make_lease, make_step
from tests.learner.optimizer.test_update import one_weight
from tests.learner.test_train import make_config, run

CPU = torch.device("cpu")


def report(norm: float, spike: bool = False) -> UpdateReport:
    return UpdateReport(loss=0.0, grad_norm=norm, applied=not spike and math.isfinite(norm), lr=1.0, spike=spike)


def test_the_limit_is_that_of_a_running_median_which_skipped_ones_are_part_of():
    rng, spikes, reference = np.random.default_rng(0), Spikes(3.0), []
    for norm in rng.lognormal(0.0, 1.5, 3 * WINDOW):
        enough = len(reference) >= LEAST
        limit = 3.0 * float(np.median(reference[-WINDOW:])) if enough else math.inf
        assert spikes.limit == pytest.approx(limit, rel=1e-12)
        spikes.note(report(float(norm), spike=norm > limit), "policy", 0)
        reference.append(float(norm))
    limits = [3.0 * np.median(reference[max(0, i - WINDOW) : i]) for i in range(LEAST, len(reference))]
    assert spikes.skipped == sum(norm > limit for norm, limit in zip(reference[LEAST:], limits, strict=True)) > 0
    spikes.note(report(math.nan), "policy", 0)
    assert spikes.norms == reference[-WINDOW:], "what is no number says nothing of the next"


def test_gradients_that_stay_where_they_jumped_to_are_soon_no_spikes():
    spikes = Spikes(2.0)
    for norm in [1.0] * WINDOW + [10.0] * WINDOW:
        spikes.note(report(norm, spike=norm > spikes.limit), "policy", 0)
    assert 0 < spikes.skipped <= WINDOW // 2 + 1 and spikes.limit == 20.0


def test_a_spike_leaves_weights_and_optimizer_alone_and_is_no_fault(tmp_path: Path):
    guard = NonFiniteGuard(tmp_path, 0, 1)
    weight, optimizer = one_weight([3.0, 4.0])
    found = apply_update([weight], optimizer, loss=torch.tensor(0.5), lr=1.0, clip_norm=1.0, limit=4.9)
    assert found == UpdateReport(loss=0.5, grad_norm=5.0, applied=False, lr=1.0, spike=True)
    assert weight.grad is None and not weight.detach().any()
    for _ in range(5):
        guard.observe(0, found, [])
    assert guard.skipped == 0 and not any(tmp_path.iterdir())
    bad = UpdateReport(loss=math.nan, grad_norm=1.0, applied=False, lr=1.0)
    with pytest.raises(NonFiniteError):
        for _ in range(3):
            guard.observe(0, bad, [])


def spiky(folder: Path) -> Config:
    """A loss whose gradient is not bounded, so that steps differ; anything above 1.05 times the median is skipped."""
    config = make_config(folder, skip_spikes=1.05, steps=10, max_nonfinite_steps=1, lr=1e-4)
    config.loss = LossConfig(preset="no_correction")
    return config


def test_a_run_that_skips_spikes_trains_each_batch_once_and_resumes_with_the_same_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(spikes_module, "LEAST", 4)
    with caplog.at_level(logging.WARNING):
        replay = FedReplay()
        whole, rows = run(spiky(tmp_path / "whole"), replay)
    skipped = [row["optim/spikes_skipped"] for row in rows.rows]
    assert skipped[3] == 0 < skipped[-1] and skipped == sorted(skipped)
    assert "learner.skip_spikes=1.05" in caplog.text
    first = 1 + next(place for place, count in enumerate(skipped) if count)
    assert f"step {first}: the gradient of the policy" in caplog.text and f"step {first - 1}:" not in caplog.text
    assert replay.named("trained") == [(step, step + 1) for step in range(10)]
    first = FedReplay()
    run(spiky(tmp_path / "broken"), first, asked=lambda: len(first.named("trained")) >= 7)
    again = FedReplay()
    again.next_version = 8
    resumed, later = run(spiky(tmp_path / "broken"), again, resume=True)
    assert [row["optim/spikes_skipped"] for row in later.rows] == skipped[7:]
    assert all(torch.equal(whole.newest[name], tensor) for name, tensor in resumed.newest.items())


def test_a_token_without_gradient_is_counted(tmp_path: Path):
    config = make_config(tmp_path)
    config.loss = LossConfig(preset="no_correction", entropy_coef=0.1)
    plan, groups = make_step(4, groups=4, size=4)
    lease = make_lease(plan, groups)
    roles = build_roles(config, CPU, None)
    (minibatch,) = plan_minibatches(plan, rank=0, updates=1, budget=Budget(tokens=60, attention=240))
    batches = [pack(lease, members, CPU) for members in minibatch.micro_batches]
    batches, _ = with_targets(plan, batches, config.advantage, 0.0, CPU)
    batches[0] = replace(batches[0], advantages=torch.zeros(len(batches[0].input_ids)))
    _, measured = accumulate(config, roles.policy, batches, minibatch.denominators)
    idle = sum(int(((batch.advantages == 0) & batch.loss_mask).sum()) for batch in batches)
    assert measured.ratios["loss/zero_gradient_share"] == (idle, minibatch.denominators.tokens)
    assert len(batches) > 1 and 0 < idle < minibatch.denominators.tokens


@pytest.mark.parametrize("budget", [10_000, 60])
def test_the_entropy_bonus_of_a_step_is_that_of_plain_transformers(tmp_path: Path, budget: int):
    config = make_config(tmp_path)
    plan, groups = make_step(4, groups=4, size=4)
    lease = make_lease(plan, groups)
    (minibatch,) = plan_minibatches(plan, rank=0, updates=1, budget=Budget(tokens=budget, attention=4 * budget))
    found = []
    for coefficient in (0.0, 0.5):
        config.loss = LossConfig(entropy_coef=coefficient)
        roles = build_roles(config, CPU, None)
        batches = [pack(lease, members, CPU) for members in minibatch.micro_batches]
        batches, _ = with_targets(plan, batches, config.advantage, 0.0, CPU)
        accumulate(config, roles.policy, batches, minibatch.denominators)
        entropy = loss_inputs(config, roles.policy, batches[0]).entropy
        assert entropy is not None and entropy.requires_grad == bool(coefficient)
        found.append(gradient(roles.policy))
        roles.policy.zero_grad()
    policy = roles.policy.double()
    policy.hf.set_attn_implementation("eager")
    total = torch.zeros((), dtype=torch.float64)
    for member, each in lease.trajectories.items():
        fresh = np.array(
            [plan.staleness.get(int(version), 99) <= plan.max_staleness for version in each.policy_versions]
        )
        where = torch.tensor(np.flatnonzero(each.loss_mask & fresh) - 1)
        logits = policy.hf(input_ids=torch.tensor(each.token_ids).long()[None], use_cache=False).logits[0, where]
        table = (logits / config.rollout.temperature).log_softmax(-1)
        total = total - (table.exp() * table).sum() / minibatch.denominators.tokens
        assert member in plan.shards[0]
    (-0.5 * total).backward()
    bonus = gradient(policy)
    torch.testing.assert_close(found[1].double() - found[0], bonus, atol=1e-5 * bonus.abs().max().item(), rtol=0)
    assert bonus.norm() > 1e-3 * found[0].norm()
