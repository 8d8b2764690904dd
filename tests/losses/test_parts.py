"""Each axis by itself against a few lines of numpy: clip caps, levels, weights, rejection, aggregation, KL."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.losses import LossConfig, kl_estimate, policy_loss, preset
from asyncrl.losses.kl import AdaptiveKL
from tests.losses import references as numpy_losses
from tests.losses.batches import random_batch, to_inputs
from tests.losses.references import Batch, exp, gradient, per_sequence, rows, token_mean


def agree(batch: Batch, config: LossConfig, reference, ref: bool = False) -> None:
    inputs = to_inputs(batch, ref=ref)
    out = policy_loss(inputs, config)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(reference(batch, batch.cur, batch.cur), rel=1e-9, abs=1e-12)
    assert inputs.learner_logprobs.grad is not None
    np.testing.assert_allclose(inputs.learner_logprobs.grad.numpy(), gradient(reference, batch), rtol=1e-5, atol=1e-8)


def test_two_sided_cap_bounds_the_unclipped_ratio() -> None:
    def reference(b: Batch, cur, sg):
        r = exp(cur - b.mu)
        return token_mean(b, -np.minimum(np.minimum(r, 1.5) * b.advantages, np.clip(r, 0.8, 1.2) * b.advantages))

    agree(random_batch(4, noise=1.5, proximal=False), preset("ppo", delta=1.5), reference)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", "gspo_token", "segment"])
def test_the_clip_acts_on_the_ratio_of_its_level(level: str) -> None:
    def turns(b: Batch):
        for index in rows(b):
            cuts = np.flatnonzero(np.diff(index) > 1) + 1
            yield from np.split(index, cuts)

    def ratio(b: Batch, cur, sg):
        d = cur - b.mu
        if level == "token":
            return exp(d)
        if level == "sequence":
            return per_sequence(b, lambda i: exp(d[i].sum()))
        if level == "geometric":
            return per_sequence(b, lambda i: exp(d[i].mean()))
        if level == "gspo_token":
            return per_sequence(b, lambda i: exp((sg - b.mu)[i].mean()) * np.exp(cur[i] - sg[i]))
        out = np.zeros_like(cur)
        for i in turns(b):
            out[i] = exp(d[i].mean())
        return out

    def reference(b: Batch, cur, sg):
        return token_mean(b, numpy_losses.clipped(b.advantages, ratio(b, cur, sg), 0.8, 1.2))

    for seed in range(3):
        agree(random_batch(seed, proximal=False), preset("ppo", level=level), reference)


WEIGHTS = {
    "truncate": lambda w: np.minimum(w, 1.2),
    "clip": lambda w: np.clip(w, 0.9, 1.2),
    "zero": lambda w: np.where((w >= 0.9) & (w <= 1.2), w, 0),
    "mask": lambda w: ((w >= 0.9) & (w <= 1.2)) * 1.0,
}


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_behavior_weight_multiplies_the_surrogate(weight: str, level: str) -> None:
    def reference(b: Batch, cur, sg):
        d = numpy_losses.prox_of(b) - b.mu
        w = exp(d)
        if level != "token":
            reduce = np.sum if level == "sequence" else np.mean
            w = per_sequence(b, lambda i: exp(reduce(d[i])))
        return token_mean(b, WEIGHTS[weight](w) * numpy_losses.ppo_tokens(b, cur, 0.8, 1.2))

    config = preset("ppo", weight=weight, weight_level=level, weight_low=0.9, weight_high=1.2)
    agree(random_batch(5), config, reference)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_self_normalized_weights_average_to_one(level: str) -> None:
    def reference(b: Batch, cur, sg):
        d = numpy_losses.prox_of(b) - b.mu
        if level == "token":
            w = np.minimum(exp(d), 1.5)
            w = w / w[b.mask].mean()
        else:
            w = np.minimum(per_sequence(b, lambda i: exp(d[i].sum())), 1.5)
            w = w / np.mean([w[i].mean() for i in rows(b)])
        return token_mean(b, w * numpy_losses.ppo_tokens(b, cur, 0.8, 1.2))

    agree(random_batch(6), preset("ppo", weight="self_normalize", weight_level=level, weight_high=1.5), reference)


def test_reinforce_takes_its_weight_on_the_whole_edge() -> None:
    def reference(b: Batch, cur, sg):
        return token_mean(b, -np.minimum(exp(sg - b.mu), 1.3) * b.advantages * cur)

    for proximal in (True, False):
        batch = random_batch(7, proximal=proximal)
        agree(batch, preset("reinforce", weight="truncate", weight_high=1.3), reference)


STATISTICS = {
    "ratio": lambda d, p, q: d,
    "k1": lambda d, p, q: -d,
    "k2": lambda d, p, q: d**2 / 2,
    "k3": lambda d, p, q: np.exp(d) - 1 - d,
    "tv": lambda d, p, q: np.abs(p - q),
    "binary_kl": lambda d, p, q: q * np.log(q / p) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8)),
}
SCOPES = {"token": None, "sequence_mean": np.mean, "sequence_sum": np.sum, "sequence_max": np.max}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", STATISTICS)
def test_rejection_by_statistic_and_scope(name: str, scope: str) -> None:
    high = {"ratio": 1.05, "k1": 0.1, "k2": 0.05, "k3": 0.05, "tv": 0.05, "binary_kl": 0.02}[name]

    def keep(b: Batch, sg):
        d = sg - b.mu
        s = STATISTICS[name](d, np.exp(sg), np.exp(b.mu))
        if scope != "token":
            s = per_sequence(b, lambda i: SCOPES[scope](s[i]))
        if name == "ratio":
            s = exp(s)
        return s <= high

    def reference(b: Batch, cur, sg):
        return token_mean(b, numpy_losses.ppo_tokens(b, cur, 0.8, 1.2) * keep(b, sg))

    batch = random_batch(8, proximal=False)
    config = preset("ppo", reject=name, reject_scope=scope, reject_high=high)
    agree(batch, config, reference)
    kept = keep(batch, batch.cur)[batch.mask]
    assert kept.any() and not kept.all(), "the case must reject some and keep some"


@pytest.mark.parametrize("gate", ["negative", "outward"])
def test_gated_rejection_spares_the_other_tokens(gate: str) -> None:
    def reference(b: Batch, cur, sg):
        d = sg - b.mu
        gated = b.advantages < 0 if gate == "negative" else b.advantages * d > 0
        return token_mean(b, numpy_losses.ppo_tokens(b, cur, 0.8, 1.2) * ~((d**2 / 2 > 0.01) & gated))

    agree(random_batch(9, proximal=False), preset("ppo", reject="k2", reject_high=0.01, reject_gate=gate), reference)


def test_veto_drops_the_whole_sequence() -> None:
    def reference(b: Batch, cur, sg):
        keep = per_sequence(b, lambda i: float(exp((sg - b.mu)[i]).min() >= 0.7)) > 0
        return token_mean(b, numpy_losses.ppo_tokens(b, cur, 0.8, 1.2) * keep)

    agree(random_batch(12, proximal=False), preset("ppo", veto=0.7), reference)


def test_max_age_drops_old_tokens_and_renormalize_does_not_count_them() -> None:
    def keep(b: Batch):
        return b.age <= 2

    def kept_in_denominator(b: Batch, cur, sg):
        return token_mean(b, numpy_losses.ppo_tokens(b, cur, 0.8, 1.2) * keep(b))

    def renormalized(b: Batch, cur, sg):
        return numpy_losses.ppo_tokens(b, cur, 0.8, 1.2)[keep(b) & b.mask].mean()

    batch = random_batch(13, proximal=False)
    agree(batch, preset("ppo", max_age=2), kept_in_denominator)
    agree(batch, preset("ppo", max_age=2, denominator="renormalize"), renormalized)


AGGREGATIONS = {
    "token_mean": token_mean,
    "seq_mean_token_mean": numpy_losses.seq_mean_token_mean,
    "seq_mean_token_sum": numpy_losses.seq_mean_token_sum,
    "constant": lambda b, loss: numpy_losses.constant(b, loss, 17.0),
    "prompt_mean": numpy_losses.prompt_mean,
    "token_sum": lambda b, loss: loss[b.mask].sum(),
}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregations(name: str) -> None:
    def reference(b: Batch, cur, sg):
        return AGGREGATIONS[name](b, numpy_losses.ppo_tokens(b, cur, 0.8, 1.2))

    extra = {"constant_length": 17.0} if name == "constant" else {}
    agree(random_batch(14, proximal=False), preset("ppo", aggregation=name, **extra), reference)


def kl_values(cur, ref, kind: str):
    d = cur - ref
    return {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) + d - 1, "abs": np.abs(d)}[kind]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_kl_to_the_reference_is_aggregated_like_the_loss(kind: str) -> None:
    def plain(b: Batch, cur, sg):
        loss = numpy_losses.ppo_tokens(b, cur, 0.8, 1.2) + 0.3 * kl_values(cur, b.ref, kind)
        return numpy_losses.seq_mean_token_mean(b, loss)

    def times_ratio(b: Batch, cur, sg):
        loss = numpy_losses.ppo_tokens(b, cur, 0.8, 1.2) + 0.3 * exp(cur - b.old()) * kl_values(cur, b.ref, kind)
        return numpy_losses.seq_mean_token_mean(b, loss)

    batch = random_batch(15)
    agree(batch, preset("grpo", kl=kind, kl_coef=0.3), plain, ref=True)
    agree(batch, preset("grpo", kl=f"ratio_{kind}", kl_coef=0.3), times_ratio, ref=True)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_straight_through_kl_has_the_gradient_of_k2(kind: str) -> None:
    cur = torch.linspace(-3, 0, 9, dtype=torch.float64, requires_grad=True)
    ref = torch.linspace(-2, -1, 9, dtype=torch.float64)
    values = kl_estimate(cur, ref, f"{kind}+")
    values.sum().backward()
    torch.testing.assert_close(values.detach(), kl_estimate(cur.detach(), ref, kind))
    torch.testing.assert_close(cur.grad, cur.detach() - ref)


def test_unknown_kl_estimator_is_refused() -> None:
    with pytest.raises(ConfigError, match="k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_adaptive_kl_coefficient_follows_the_published_rule() -> None:
    rule = AdaptiveKL(target=6.0, horizon=10000.0)
    assert rule.adapted(0.2, 9.0, 256) == pytest.approx(0.201024)
    assert rule.adapted(0.201024, 5.4, 256) == pytest.approx(0.201024 * (1 - 0.1 * 256 / 10000))
    assert rule.adapted(0.2, float("nan"), 256) == 0.2
    assert rule.adapted(0.2, 0.0, 1e9) == 0.0
    with pytest.raises(ConfigError, match="above 0"):
        AdaptiveKL(target=0.0, horizon=1.0)


def test_behavior_kl_covers_rejected_tokens_too() -> None:
    def reference(b: Batch, cur, sg):
        loss = numpy_losses.ppo_tokens(b, cur, 0.8, 1.2) * (b.age <= 0) + 0.01 * (cur - b.mu) ** 2
        return token_mean(b, loss)

    agree(random_batch(16, proximal=False), preset("ppo", max_age=0, behavior_kl=0.01), reference)


@pytest.mark.parametrize(
    "settings",
    [{"behavior_kl": 0.01}, *({"kl": kind, "kl_coef": 0.01} for kind in ("k2", "k3", "abs", "k1+", "k3+", "ratio_k3"))],
)
def test_differences_of_rounding_size_are_not_pulled_back(settings: dict[str, Any]) -> None:
    """With equal rewards they were the whole gradient of the first step, which Adam made a full one."""
    inputs = to_inputs(random_batch(16, proximal=False))
    mask = inputs.loss_mask
    for apart, pulled in ((1e-6, False), (1e-5, False), (1e-3, True), (float("nan"), None)):
        cur = (inputs.behavior_logprobs + apart).detach().requires_grad_()
        same = dataclasses.replace(
            inputs,
            learner_logprobs=cur,
            ref_logprobs=inputs.behavior_logprobs,
            advantages=torch.zeros_like(inputs.advantages),
        )
        out = policy_loss(same, preset("ppo", **settings))
        (gradient,) = torch.autograd.grad(out.loss, cur)
        if pulled is None:  # no rounding: the step is skipped
            assert all(part.isnan() for part in out.parts.values())
            continue
        assert bool((gradient[mask] != 0).all()) == pulled, apart
        assert bool((gradient[mask] == 0).all()) != pulled, apart


def test_a_prompt_mean_needs_group_ids() -> None:
    inputs = dataclasses.replace(to_inputs(random_batch(0)), group_ids=None)
    with pytest.raises(ConfigError, match="group_ids"):
        policy_loss(inputs, preset("scale_rl"))


def test_ids_may_be_sparse_and_need_not_start_at_zero() -> None:
    inputs = to_inputs(random_batch(17))
    sparse = dataclasses.replace(inputs, sequence_ids=inputs.sequence_ids * 10**9 + 5)
    assert policy_loss(sparse, preset("grpo")).loss.item() == policy_loss(inputs, preset("grpo")).loss.item()


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "prompt_mean"])
def test_the_entropy_bonus_is_aggregated_as_the_loss_and_covers_rejected_tokens_too(aggregation: str) -> None:
    batch = random_batch(3, proximal=False)
    rng = np.random.default_rng(0)
    entropy = np.where(batch.mask, 3 * rng.random(len(batch.cur)), np.nan)
    inputs = dataclasses.replace(to_inputs(batch), entropy=torch.tensor(entropy, requires_grad=True))
    settings = {"aggregation": aggregation, "max_age": 2}
    without, config = preset("ppo", **settings), preset("ppo", entropy_coef=0.3, **settings)
    base, out = policy_loss(inputs, without), policy_loss(inputs, config)
    factors = np.zeros(len(batch.cur))
    sequences = [index for index in rows(batch) if len(index)]
    for index in sequences:
        group = batch.mask & (batch.group == batch.group[index[0]])
        groups = len(np.unique(batch.group[batch.mask]))
        factors[index] = {
            "token_mean": 1 / batch.mask.sum(),
            "seq_mean_token_mean": 1 / (len(index) * len(sequences)),
            "prompt_mean": 1 / (group.sum() * groups),
        }[aggregation]
    bonus = 0.3 * (factors * np.where(batch.mask, entropy, 0.0)).sum()
    assert (out.loss - base.loss).item() == pytest.approx(-bonus, rel=1e-12)
    assert out.parts["loss/entropy"].item() == pytest.approx(-bonus, rel=1e-12)
    assert inputs.entropy is not None
    (found,) = torch.autograd.grad(out.loss, [inputs.entropy], retain_graph=True)
    np.testing.assert_allclose(found.numpy(), -0.3 * factors, rtol=1e-12)
    assert policy_loss(to_inputs(batch), without).loss.item() == base.loss.item()
    with pytest.raises(ConfigError, match=r"loss\.entropy_coef=0\.3 needs entropy"):
        policy_loss(to_inputs(batch), config)
