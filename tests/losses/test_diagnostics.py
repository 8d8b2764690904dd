"""The diagnostics against numpy: raw ratios, per edge, per sequence, per age."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from asyncrl.learner.step.metrics import Measured, MicroBatchMetrics
from asyncrl.losses import LossInputs, policy_loss, preset
from asyncrl.losses.diagnostics import MAX_AGES, ess_lr_scale
from tests.losses.batches import random_batch, to_inputs
from tests.losses.references import prox_of, rows


def test_every_edge_is_measured_over_its_raw_ratios() -> None:
    batch = random_batch(3, noise=1.0)
    metrics = policy_loss(to_inputs(batch), preset("tis", weight_high=1.01)).metrics
    prox = prox_of(batch)
    for edge, d in (("B", prox - batch.mu), ("U", batch.cur - prox), ("E", batch.cur - batch.mu)):
        r = np.exp(d[batch.mask])
        log_r = d[batch.mask]
        w = np.array([np.exp(d[i].sum()) for i in rows(batch)])
        expected = {
            "mean": r.mean(),
            "rms_log_ratio": math.sqrt((log_r**2).mean()),
            "kl_k1": -log_r.mean(),
            "kl_k3": (r - 1 - log_r).mean(),
            "abs_error": np.abs(r - 1).mean(),
            "ess_token": r.sum() ** 2 / (len(r) * (r**2).sum()),
            "chi2_token": (r**2).mean() - 1,
            "ess_seq": w.sum() ** 2 / (len(w) * (w**2).sum()),
            "chi2_seq": (w**2).mean() - 1,
            "log_ppl_gap": np.mean([-d[i].mean() for i in rows(batch)]),
            "max": max(r.max(), 1.0),
        }
        for name, value in expected.items():
            assert metrics[f"ratio/{edge}/{name}"].item() == pytest.approx(value), (edge, name)
    assert metrics["kl/behavior"] == metrics["ratio/E/kl_k3"]


def test_sequences_that_are_all_far_away_are_no_full_sample() -> None:
    """Clamped, their weights would be equal, and VCPO would take the whole learning rate."""
    gaps = np.array([-25.0, -30.0, -45.0, -60.0])
    zeros = torch.zeros(400, dtype=torch.float64)
    inputs = LossInputs(
        learner_logprobs=torch.tensor(np.repeat(gaps / 100, 100)),
        behavior_logprobs=zeros,
        advantages=zeros + 1.0,
        loss_mask=torch.ones(400, dtype=torch.bool),
        sequence_ids=torch.arange(4).repeat_interleave(100),
    )
    w = np.exp(gaps)
    found = policy_loss(inputs, preset("vcpo")).metrics["ratio/E/ess_seq"].item()
    assert found == pytest.approx(w.sum() ** 2 / (4 * (w**2).sum()), rel=1e-6)


def test_what_was_clipped_cut_and_rejected_is_counted_by_side_and_reason() -> None:
    batch = random_batch(3, noise=1.0, proximal=True)
    config = preset("tis", weight_low=0.0, weight_high=1.05, max_age=2)
    metrics = policy_loss(to_inputs(batch), config).metrics
    u, w = np.exp(batch.cur - prox_of(batch)), np.exp(prox_of(batch) - batch.mu)
    low = ((u < 0.8) & (batch.advantages < 0))[batch.mask].mean()
    high = ((u > 1.2) & (batch.advantages > 0))[batch.mask].mean()
    assert metrics["policy/clip_low"].item() == pytest.approx(low)
    assert metrics["policy/clip_high"].item() == pytest.approx(high)
    assert metrics["policy/clip_fraction"].item() == pytest.approx(low + high)
    assert metrics["policy/weight_high"].item() == pytest.approx((w > 1.05)[batch.mask].mean())
    assert metrics["policy/rejected_age"].item() == pytest.approx((batch.age > 2)[batch.mask].mean())
    positive = ((batch.age > 2) & (batch.advantages > 0))[batch.mask].mean()
    assert metrics["policy/rejected_age_positive"].item() == pytest.approx(positive)


def test_the_staleness_table_resolves_the_edge_by_age() -> None:
    batch = random_batch(5, noise=1.0, proximal=False)
    metrics = policy_loss(to_inputs(batch), preset("ppo")).metrics
    d, r = batch.cur - batch.mu, np.exp(batch.cur - batch.mu)
    ages = np.unique(batch.age[batch.mask])
    assert {name.split("/")[1] for name in metrics if name.startswith("staleness/")} == {f"age_{a}" for a in ages}
    for age in ages:
        at = (batch.age == age) & batch.mask
        clipped = ((r < 0.8) & (batch.advantages < 0)) | ((r > 1.2) & (batch.advantages > 0))
        place = f"staleness/age_{age}"
        assert metrics[f"{place}/token_share"].item() == pytest.approx(at.sum() / batch.mask.sum())
        assert metrics[f"{place}/rms_log_ratio"].item() == pytest.approx(math.sqrt((d[at] ** 2).mean()))
        assert metrics[f"{place}/ess_token"].item() == pytest.approx(r[at].mean() ** 2 / (r[at] ** 2).mean())
        assert metrics[f"{place}/clip_fraction"].item() == pytest.approx(clipped[at].mean())


def test_every_token_is_in_one_bin_of_the_ratios_of_its_age_and_bins_add_up_over_ranks() -> None:
    batch = random_batch(5, noise=1.0, proximal=False)
    sums = policy_loss(to_inputs(batch), preset("ppo")).sums
    measured = Measured.of(MicroBatchMetrics(sums))
    measured.add(Measured.of(MicroBatchMetrics(sums)))
    found = measured.histograms()
    ages = np.unique(batch.age[batch.mask])
    assert set(found) == {f"histogram/ratio/age_{age}" for age in ages}
    for age in ages:
        edges, counts = found[f"histogram/ratio/age_{age}"]
        expected, _ = np.histogram((batch.cur - batch.mu)[(batch.age == age) & batch.mask], edges)
        assert list(2 * expected) == counts and sum(counts) > 0
    far = dataclasses.replace(to_inputs(batch), behavior_logprobs=to_inputs(batch).behavior_logprobs - 1e6)
    for _, counts in Measured.of(MicroBatchMetrics(policy_loss(far, preset("ppo")).sums)).histograms().values():
        assert sum(counts[:-1]) == 0 < counts[-1]


def test_very_old_tokens_share_the_last_row() -> None:
    inputs = to_inputs(random_batch(5))
    assert inputs.staleness is not None
    inputs = dataclasses.replace(inputs, staleness=inputs.staleness + 1000)
    metrics = policy_loss(inputs, preset("ppo")).metrics
    assert metrics[f"staleness/age_{MAX_AGES}/token_share"].item() == 1.0


def test_entropy_and_reference_kl_are_reported_when_given() -> None:
    batch = random_batch(6)
    inputs = dataclasses.replace(to_inputs(batch, ref=True), entropy=torch.tensor(batch.age, dtype=torch.float64))
    metrics = policy_loss(inputs, preset("ppo")).metrics
    assert metrics["policy/entropy"].item() == pytest.approx(batch.age[batch.mask].mean())
    d = (batch.ref - batch.cur)[batch.mask]
    assert metrics["kl/reference"].item() == pytest.approx((np.exp(d) - 1 - d).mean())


def test_without_diagnostics_the_loss_is_the_same_and_only_its_parts_are_reported() -> None:
    inputs = to_inputs(random_batch(7), ref=True)
    config = preset("ppo", behavior_kl=0.1, kl_coef=0.1)
    with_them, without = policy_loss(inputs, config), policy_loss(inputs, config, diagnostics=False)
    assert with_them.loss.item() == without.loss.item()
    assert set(without.metrics) == {"loss/policy", "loss/kl", "loss/behavior_kl"}
    assert sum(part.item() for part in without.parts.values()) == pytest.approx(without.loss.item())


def test_the_learning_rate_follows_the_effective_sample_size() -> None:
    assert ess_lr_scale(0.25) == 0.5
    assert ess_lr_scale(1.5) == 1.0
    assert ess_lr_scale(-1e-9) == 0.0
