"""Identities between losses, edges and splits that hold for all numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.learner.step.metrics import Measured, MicroBatchMetrics
from asyncrl.losses import PRESETS, Denominators, LossInputs, policy_loss, preset
from asyncrl.losses.kept import first_pass
from asyncrl.settings.loss.meaning import needs_first_pass, proximal_source
from tests.losses.batches import random_batch, take, to_inputs
from tests.losses.references import rows


def loss_and_gradient(inputs: LossInputs, config, denominators=None, kept=None) -> tuple[float, torch.Tensor]:
    inputs.learner_logprobs.grad = None
    out = policy_loss(inputs, config, denominators, kept=kept)
    out.loss.backward()
    assert inputs.learner_logprobs.grad is not None
    return out.loss.item(), inputs.learner_logprobs.grad.clone()


SPLITTABLE: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in PRESETS},
    "m2po_areal keep": ("m2po_areal", {"denominator": "keep"}),
    **{f"{name} tight": (name, {"m2_tau": 0.002}) for name in ("m2po_paper", "m2po_release", "m2po_areal")},
    "sat": ("ppo", {"sat_quantile": 0.6}),
    "sat of sequences": ("gspo", {"sat_quantile": 0.6, "clip_high": 0.1}),
    **{
        f"self_normalize {level}": ("ppo", {"weight": "self_normalize", "weight_level": level, "weight_high": 1.5})
        for level in ("token", "sequence", "geometric", "segment")
    },
}


@pytest.mark.parametrize("name", SPLITTABLE)
@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    parts=st.integers(1, 4),
    aggregation=st.sampled_from(
        ["", "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant", "prompt_mean"]
    ),
)
def test_splitting_into_micro_batches_changes_nothing(name: str, seed: int, parts: int, aggregation: str) -> None:
    batch = random_batch(seed)
    row, changes = SPLITTABLE[name]
    config = preset(row, **changes, **({"aggregation": aggregation} if aggregation else {}), behavior_kl=0.01)
    sequences = list(rows(batch))
    groups = {int(batch.group[i[0]]) for i in sequences}
    denominators = Denominators(float(batch.mask.sum()), float(len(sequences)), float(len(groups)))
    whole, whole_gradient = loss_and_gradient(to_inputs(batch), config)
    where = np.random.default_rng(seed).integers(0, parts, batch.seq.max() + 1)[batch.seq]
    total, gradient = 0.0, torch.zeros_like(whole_gradient)
    per_group = np.bincount(batch.group, weights=batch.mask)[batch.group]
    places = [np.flatnonzero(where == part) for part in range(parts)]
    shares = [
        dataclasses.replace(to_inputs(take(batch, index)), group_tokens=torch.tensor(per_group[index]))
        for index in places
    ]
    kept = first_pass(shares, config) if needs_first_pass(config) else None
    for inputs, index in zip(shares, places, strict=True):
        loss, grad = loss_and_gradient(inputs, config, denominators, kept)
        total += loss
        gradient[index] = grad
    assert total == pytest.approx(whole, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-9, atol=1e-12)


def test_a_loss_that_divides_by_what_it_keeps_is_not_given_counts_of_everything() -> None:
    with pytest.raises(ConfigError, match="pass kept=first_pass"):
        policy_loss(to_inputs(random_batch(0)), preset("geo_rs"), Denominators(9.0, 3.0, 1.0))


def test_metrics_of_micro_batches_reduce_to_those_of_the_whole() -> None:
    batch = random_batch(3)
    whole = policy_loss(to_inputs(batch), preset("ppo"))
    pieces = [policy_loss(to_inputs(take(batch, np.flatnonzero(batch.seq % 2 == k))), preset("ppo")) for k in (0, 1)]
    measured = Measured()
    for piece in pieces:
        measured.add(Measured.of(MicroBatchMetrics(piece.sums)))
    merged = measured.row()
    assert set(merged) == set(whole.metrics) - set(whole.parts)
    for name, value in merged.items():
        assert value == pytest.approx(whole.metrics[name].item()), name


def test_gspo_token_has_the_gradient_of_gspo_when_the_advantage_is_one_per_sequence() -> None:
    for seed in (0, 2, 4):
        inputs = to_inputs(random_batch(seed, noise=0.001, small=0.0001))
        value, gradient = loss_and_gradient(inputs, preset("gspo"))
        token_value, token_gradient = loss_and_gradient(inputs, preset("gspo_token"))
        assert token_value == pytest.approx(value)
        torch.testing.assert_close(token_gradient, gradient)


def test_the_staleness_adaptive_clip_is_never_looser_than_the_clip_and_stops_tokens_of_the_tail_alone() -> None:
    """Its surrogate is at most PPO's; the gradient of a token is that of PPO, or 0 beyond the quantile."""
    stopped = 0
    for seed in range(20):
        inputs = to_inputs(random_batch(seed, proximal=False))
        far = torch.where(inputs.loss_mask, (inputs.learner_logprobs - inputs.behavior_logprobs).abs(), 0.0).detach()
        tail = far[inputs.loss_mask].quantile(0.8, interpolation="lower")
        loose, slope = loss_and_gradient(inputs, preset("ppo"))
        tight, narrow = loss_and_gradient(inputs, preset("ppo", sat_quantile=0.8))
        assert tight >= loose - 1e-12
        other = narrow != slope
        assert (narrow[other] == 0).all() and (far[other] > tail).all()
        stopped += int(other.sum())
    assert stopped > 0


def test_with_the_current_policy_as_proximal_the_update_ratio_is_one_and_its_clip_idle() -> None:
    inputs = to_inputs(random_batch(5))
    inputs = dataclasses.replace(inputs, proximal_logprobs=inputs.learner_logprobs.detach())
    narrow = loss_and_gradient(inputs, preset("tis", clip_low=0.001, clip_high=0.001))
    wide = loss_and_gradient(inputs, preset("tis", clip_low=0.5, clip_high=5.0))
    assert narrow[0] == wide[0]
    torch.testing.assert_close(narrow[1], wide[1])


def test_weight_on_b_times_ratio_on_u_is_the_ratio_on_e() -> None:
    inputs = to_inputs(random_batch(6))
    wide = {"clip_low": 1.0, "clip_high": 1e9}
    decoupled = loss_and_gradient(inputs, preset("decoupled_ppo", **wide))
    direct = loss_and_gradient(inputs, preset("ppo", edge="E", **wide))
    assert decoupled[0] == pytest.approx(direct[0])
    torch.testing.assert_close(decoupled[1], direct[1])


def test_k3_over_the_product_of_edges_splits_as_derived() -> None:
    b, u = np.exp(np.linspace(-1, 1, 9)), np.exp(np.linspace(1, -0.5, 9))

    def k3(r: np.ndarray) -> np.ndarray:
        return r - 1 - np.log(r)

    np.testing.assert_allclose(k3(b * u), k3(b) + k3(u) + (b - 1) * (u - 1))
    cur, prox, mu = np.log(u * b) - 5, np.log(b) - 5, np.full(9, -5.0)
    inputs = LossInputs(
        torch.tensor(cur),
        torch.tensor(mu),
        torch.ones(9),
        torch.ones(9, dtype=torch.bool),
        torch.arange(9),
        proximal_logprobs=torch.tensor(prox),
    )
    metrics = policy_loss(inputs, preset("ppo")).metrics
    cross = ((b - 1) * (u - 1)).mean()
    parts = metrics["ratio/B/kl_k3"] + metrics["ratio/U/kl_k3"] + cross
    assert metrics["ratio/E/kl_k3"].item() == pytest.approx(parts.item())


def test_luspo_is_gspo_weighted_by_length() -> None:
    batch = random_batch(2)
    only = take(batch, np.flatnonzero(batch.seq == 0))
    length = only.mask.sum()
    gspo, luspo = (policy_loss(to_inputs(only), preset(name)).loss.item() for name in ("gspo", "luspo"))
    assert luspo == pytest.approx(gspo * length)


def test_on_policy_every_correction_is_the_plain_policy_gradient() -> None:
    batch = random_batch(4, noise=0.0, small=0.0, proximal=False)
    inputs = to_inputs(batch)
    inputs = dataclasses.replace(
        inputs, behavior_logprobs=inputs.learner_logprobs.detach(), proximal_logprobs=inputs.learner_logprobs.detach()
    )
    _, plain = loss_and_gradient(inputs, preset("reinforce"))
    same_form = set(PRESETS) - {"vespo"}
    for name in sorted(same_form):
        config = preset(name, aggregation="token_mean")
        if name in ("gspo", "luspo", "rloo", "gmpo", "gspo_token"):
            continue
        _, gradient = loss_and_gradient(inputs, config)
        torch.testing.assert_close(gradient, plain, msg=name)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(PRESETS)),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1.0, 30.0, 1e3, 1e6]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    garbage=st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30]),
)
def test_no_token_can_make_loss_gradient_or_metrics_non_finite(name, seed, scale, dtype, garbage) -> None:
    batch = random_batch(seed)
    rng = np.random.default_rng(seed)
    for array in (batch.mu, batch.cur, batch.prox, batch.ref):
        assert array is not None
        array[:] = -np.abs(array) - scale * rng.random(len(array))
    for array in (batch.mu, batch.cur, batch.prox, batch.ref, batch.advantages):
        assert array is not None
        array[~batch.mask] = garbage
    inputs = to_inputs(batch, dtype, ref=True)
    for kind in ("k1", "k2", "k3", "k3+", "ratio_k3"):
        inputs.learner_logprobs.grad = None
        config = preset(name, behavior_kl=1e-3, kl=kind, kl_coef=0.1, opsm_delta=0.1)
        out = policy_loss(inputs, config)
        out.loss.backward()
        assert out.loss.isfinite()
        gradient = inputs.learner_logprobs.grad
        assert gradient is not None and gradient.isfinite().all()
        assert not gradient[~inputs.loss_mask].any()
        assert all(value.isfinite() for value in out.metrics.values())


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_an_unscored_token_counts_with_a_ratio_of_one(bad: float) -> None:
    batch = random_batch(8, proximal=False)
    token = int(np.flatnonzero(batch.mask)[0])
    unscored, scored = to_inputs(batch), to_inputs(batch)
    unscored.behavior_logprobs[token] = bad
    scored.behavior_logprobs[token] = scored.learner_logprobs[token].detach()
    assert policy_loss(unscored, preset("cispo")).loss.item() == policy_loss(scored, preset("cispo")).loss.item()


def test_a_broken_learner_reaches_the_guard() -> None:
    inputs = to_inputs(random_batch(8))
    with torch.no_grad():
        inputs.learner_logprobs[0] = float("nan")
    assert not policy_loss(inputs, preset("ppo")).loss.isfinite()


def test_gradient_flows_through_the_learner_only() -> None:
    inputs = to_inputs(random_batch(1), ref=True)
    leaves = {
        name: getattr(inputs, name).clone().requires_grad_()
        for name in ("behavior_logprobs", "proximal_logprobs", "ref_logprobs", "advantages")
    }
    policy_loss(dataclasses.replace(inputs, **leaves), preset("grpo", kl_coef=0.1)).loss.backward()
    assert all(leaf.grad is None for leaf in leaves.values())
    assert inputs.learner_logprobs.grad is not None


def test_bfloat16_is_raised_to_float32() -> None:
    inputs = to_inputs(random_batch(1), torch.bfloat16)
    assert policy_loss(inputs, preset("ppo")).loss.dtype == torch.float32


def test_the_proximal_policy_is_asked_for_only_where_it_is_used() -> None:
    assert proximal_source(preset("dppo_tv"), 1) == proximal_source(preset("ppo"), 2) == "none"
    assert proximal_source(preset("tis"), 1) == "current"
    assert proximal_source(preset("decoupled_ppo"), 2) == "recompute"
    assert proximal_source(preset("a3po"), 2) == "none"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_an_empty_micro_batch_gives_a_zero_that_can_be_differentiated(name: str) -> None:
    inputs = to_inputs(take(random_batch(0), np.array([], dtype=int)), ref=True)
    config = preset(
        name, kl_coef=0.1, behavior_kl=0.1, opsm_delta=0.1, veto=0.1, reject="k2", reject_scope="sequence_max"
    )
    kept = first_pass([inputs], config) if needs_first_pass(config) else None
    out = policy_loss(inputs, config, Denominators(10.0, 2.0, 1.0), kept=kept)
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert all(value.isfinite() for value in out.metrics.values())
