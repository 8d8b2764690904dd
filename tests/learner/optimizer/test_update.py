from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.errors import NonFiniteError
from asyncrl.learner.optimizer.update import (
    NonFiniteGuard,
    UpdateReport,
    apply_update,
    learning_rate,
    make_optimizer,
)
from asyncrl.schema import LearnerConfig
from tests.learner.batch.test_micro_batch import packed_step


def test_warm_up_is_linear_and_ends_at_the_full_rate():
    config = LearnerConfig(lr=1.0, warmup_steps=4, steps=10)
    assert [learning_rate(step, config) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_starts_at_the_full_rate_and_would_reach_zero_at_the_end(schedule: str):
    config = LearnerConfig(lr=2.0, warmup_steps=2, steps=12, schedule=schedule)
    rates = [learning_rate(step, config) for step in range(2, 13)]
    assert rates[0] == 2.0
    assert rates[5] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.0)
    assert rates == sorted(rates, reverse=True)


def one_weight(gradient: list[float]) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.zeros(1, len(gradient)))
    weight.grad = torch.tensor([gradient])
    return weight, torch.optim.SGD([weight], lr=0.0)


def test_a_gradient_longer_than_the_bound_is_scaled_to_it():
    weight, optimizer = one_weight([3.0, 4.0])
    report = apply_update([weight], optimizer, loss=torch.tensor(0.5), lr=1.0, clip_norm=1.0)
    assert report == UpdateReport(loss=0.5, grad_norm=5.0, applied=True, lr=1.0)
    torch.testing.assert_close(weight.detach(), torch.tensor([[-0.6, -0.8]]))


def test_a_gradient_within_the_bound_is_left_as_it_is():
    weight, optimizer = one_weight([0.3, 0.4])
    apply_update([weight], optimizer, loss=torch.tensor(0.0), lr=1.0, clip_norm=1.0)
    torch.testing.assert_close(weight.detach(), torch.tensor([[-0.3, -0.4]]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_non_finite_step_changes_no_weight_and_clears_the_gradient(bad: float, where: str):
    weight, optimizer = one_weight([bad if where == "gradient" else 1.0])
    report = apply_update(
        [weight], optimizer, loss=torch.tensor(bad if where == "loss" else 1.0), lr=1.0, clip_norm=1.0
    )
    assert not report.applied
    assert weight.detach().tolist() == [[0.0]]
    assert weight.grad is None


def test_norms_and_biases_are_not_decayed():
    matrix, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([matrix, bias], LearnerConfig(lr=0.1, weight_decay=0.5))
    matrix.grad, bias.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert matrix.detach().max() < 1.0
    assert bias.detach().tolist() == [1.0, 1.0]


SKIPPED = UpdateReport(loss=float("nan"), grad_norm=1.0, applied=False, lr=0.1)
APPLIED = UpdateReport(loss=1.0, grad_norm=1.0, applied=True, lr=0.1)


def test_the_guard_keeps_the_batch_that_was_skipped(tmp_path: Path):
    _, [(_, batch), *_] = packed_step(0)
    NonFiniteGuard(tmp_path, 0, 3).observe(7, SKIPPED, [batch])
    kept = np.load(tmp_path / "step_7.npz", allow_pickle=False)
    assert kept["0_input_ids"].tolist() == batch.input_ids.tolist()
    assert kept["0_behavior_logprobs"].tolist() == batch.behavior_logprobs.tolist()


def test_every_batch_of_a_step_that_was_skipped_is_kept(tmp_path: Path):
    guard = NonFiniteGuard(tmp_path, 1, 9)
    for _ in range(3):
        guard.observe(7, SKIPPED, [])
    assert {path.name for path in tmp_path.iterdir()} == {
        *("step_7_rank_1.npz", "step_7_rank_1.2.npz", "step_7_rank_1.3.npz"),
    }


def test_a_policy_that_waits_for_its_critic_warms_up_when_it_begins():
    config = LearnerConfig(lr=1.0, warmup_steps=4, steps=16, schedule="linear")
    rates = [learning_rate(step, config, first=6) for step in range(6, 16)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[5] == pytest.approx(5 / 6) and rates[-1] == pytest.approx(1 / 6)


def test_the_guard_gives_up_after_so_many_skips_in_a_row(tmp_path: Path):
    guard = NonFiniteGuard(tmp_path, 0, 2)
    for step in range(2):
        guard.observe(step, SKIPPED, [])
    with pytest.raises(NonFiniteError, match="max_nonfinite_steps=2"):
        guard.observe(2, SKIPPED, [])


def test_a_good_step_in_between_starts_the_count_again(tmp_path: Path):
    guard = NonFiniteGuard(tmp_path, 0, 1)
    for step, report in enumerate([SKIPPED, APPLIED, SKIPPED, APPLIED, SKIPPED]):
        guard.observe(step, report, [])
    assert (guard.skipped, guard.consecutive) == (3, 1)


def test_a_batch_that_cannot_be_kept_is_a_warning_and_not_the_end_of_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("a file where the folder has to go")
    guard = NonFiniteGuard(tmp_path / "file" / "nonfinite", 0, 1)
    guard.observe(7, SKIPPED, [])
    assert guard.skipped == 1 and "step 7: " in caplog.text and "could not be kept" in caplog.text
    with pytest.raises(NonFiniteError, match="could not be kept"):
        guard.observe(8, SKIPPED, [])
