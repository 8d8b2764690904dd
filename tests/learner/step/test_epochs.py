"""Passes over a batch: anchored where the first one was, equal to as many shares given twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncrl.learner.optimizer.update import learning_rate, make_optimizer
from asyncrl.learner.step import gradients
from asyncrl.losses import LossInputs
from asyncrl.schema import LearnerConfig
from asyncrl.settings.loss.keys import LossConfig
from tests.learner.fed_replay import FedReplay
from tests.learner.test_train import make_config, run


@pytest.mark.parametrize("updates", [1, 2])
def test_a_second_pass_has_the_old_policy_and_the_advantages_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: int
):
    config = make_config(tmp_path, steps=1, updates_per_batch=updates, epochs_per_batch=3)
    config.loss = LossConfig(preset="decoupled_ppo")
    seen: list[LossInputs] = []
    loss = gradients.policy_loss

    def kept(inputs: LossInputs, *given, **named):
        seen.append(inputs)
        return loss(inputs, *given, **named)

    monkeypatch.setattr(gradients, "policy_loss", kept)
    weights, rows = run(config, FedReplay())
    passes = [seen[i * len(seen) // 3 : (i + 1) * len(seen) // 3] for i in range(3)]
    assert weights.versions == [0, 1] and len(rows.rows) == 1, "a batch is one step, and one version"
    for first, *others in zip(*passes, strict=True):
        assert first.proximal_logprobs is not None and first.proximal_logprobs.grad_fn is None
        for other in others:
            for name in ("proximal_logprobs", "behavior_logprobs", "advantages", "loss_mask"):
                assert torch.equal(getattr(first, name), getattr(other, name)), name
            assert not torch.equal(first.learner_logprobs, other.learner_logprobs), "the policy has moved"
    first = passes[0][0]
    assert first.proximal_logprobs is not None
    moved = first.learner_logprobs - first.proximal_logprobs
    assert moved.abs().max() < 1e-5, "before the first update the old policy is the policy"


def test_a_schedule_ends_at_its_floor_and_without_one_as_ever():
    for schedule in ("linear", "cosine"):
        config = LearnerConfig(lr=2.0, steps=100, schedule=schedule, min_lr_ratio=0.1, warmup_steps=10)
        rates = [learning_rate(step, config) for step in range(100)]
        assert rates[9] == rates[10] == 2.0 and rates[10:] == sorted(rates[10:], reverse=True)
        assert learning_rate(100, config) == pytest.approx(0.2)
        assert learning_rate(100, config, 1.0) == pytest.approx(0.1), "the critic's own"
        assert learning_rate(100, LearnerConfig(lr=2.0, schedule=schedule)) == 0.0


def test_the_optimizer_has_the_betas_and_eps_of_the_settings():
    parameters = torch.nn.Linear(2, 2).parameters()
    optimizer = make_optimizer(parameters, LearnerConfig(beta1=0.8, beta2=0.9, adam_eps=1e-5))
    assert {(*group["betas"], group["eps"]) for group in optimizer.param_groups} == {(0.8, 0.9, 1e-5)}
