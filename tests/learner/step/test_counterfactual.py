"""The reward estimate of a rerun: exact where the policies are equal, unbiased in the direction where they differ."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from asyncrl.learner.step.counterfactual import MAX_LOG_WEIGHT, batch_sums, estimates


def estimated(log_ratios: list[float], rewards: list[float]) -> dict[str, float]:
    batch = SimpleNamespace(loss_positions=torch.arange(2 * len(rewards)))
    return estimates(batch_sums(torch.tensor(log_ratios, dtype=torch.float64), rewards, batch))


def test_the_policy_that_made_the_data_has_its_reward_and_the_full_sample_size() -> None:
    row = estimated([0.0, 0.0, 0.0], [1.0, 0.0, 0.5])
    assert row["rerun/reward_estimate"] == row["rerun/reward_of_data"] == 0.5
    assert row["rerun/ess"] == 1.0
    assert row["rerun/log_ratio"] == 0.0


def test_a_policy_that_prefers_the_rewarded_trajectory_is_worth_more() -> None:
    row = estimated([torch.tensor(3.0).log().item(), 0.0], [1.0, 0.0])
    assert row["rerun/reward_estimate"] == pytest.approx(0.75)
    assert row["rerun/reward_of_data"] == 0.5
    assert row["rerun/ess"] == pytest.approx(16 / 20)


def test_sums_of_micro_batches_add_up_to_those_of_the_batch() -> None:
    batch = SimpleNamespace(loss_positions=torch.arange(2))
    ratios, rewards = [0.3, -0.4, 0.1, 0.9], [1.0, 0.0, 0.0, 1.0]
    parts = [
        batch_sums(torch.tensor(ratios[i : i + 1], dtype=torch.float64), rewards[i : i + 1], batch) for i in range(4)
    ]
    assert estimates(sum(parts, torch.zeros(7, dtype=torch.float64))) == pytest.approx(estimated(ratios, rewards))


def test_a_ratio_beyond_the_cap_is_finite_and_no_fresh_token_gives_no_estimate() -> None:
    assert estimated([10 * MAX_LOG_WEIGHT, 0.0], [1.0, 0.0])["rerun/reward_estimate"] == pytest.approx(1.0)
    assert estimates(torch.zeros(7, dtype=torch.float64)) == {}
