"""Score centering against a sum over the whole vocabulary, in float64: gradient at the logits, for every weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.losses import LossConfig, LossInputs, TopK, policy_loss, preset
from asyncrl.settings.loss.meaning import check_loss

VOCABULARY, TOKENS = 9, 40
WEIGHTS: dict[str, tuple[LossConfig, Callable[..., Any]]] = {
    "no_correction": (preset("no_correction"), lambda r, a: np.ones_like(r)),
    "reinforce_tis": (
        preset("no_correction", weight="truncate", weight_high=1.5),
        lambda r, a: np.minimum(r, 1.5),
    ),
    "aipo": (preset("aipo", ratio_cap=1.3), lambda r, a: r * (r < 1.3)),
    "cispo": (preset("cispo", ratio_cap=1.2, edge="E"), lambda r, a: np.minimum(r, 1.2)),
    "dis": (preset("dis", band_low=0.7, band_high=1.4), lambda r, a: r * ((r > 0.7) & (r < 1.4))),
    "ppo": (
        preset("ppo", edge="E", clip_low=0.1, clip_high=0.3),
        lambda r, a: r * ~(((a > 0) & (r > 1.3)) | ((a < 0) & (r < 0.9))),
    ),
    "tis": (preset("tis", edge="U", weight_high=1.4), lambda r, a: np.minimum(r, 1.4)),
    "icepop": (preset("icepop", weight_low=0.6, weight_high=1.6), lambda r, a: r * ((r >= 0.6) & (r <= 1.6))),
}
"""Settings, and the weight f(ratio, advantage) that the score of a token has under them."""


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def setup(seed: int, k: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits of the policy, q [T, V], the head's ids [T, k], the sampled tokens and the advantages."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.standard_normal((TOKENS, VOCABULARY))
    q = softmax(logits + 0.5 * rng.standard_normal(logits.shape))
    head = np.argsort(-q, axis=1, kind="stable")[:, :k]
    sampled = np.array([rng.choice(VOCABULARY, p=row) for row in q])
    return torch.tensor(logits, requires_grad=True), q, head, sampled, rng.standard_normal(TOKENS)


def gradient(logits: torch.Tensor, q: np.ndarray, head: np.ndarray, sampled: np.ndarray, a: np.ndarray, config):
    """By `policy_loss`; [T, V] and the loss."""
    rows = torch.arange(TOKENS)
    logprobs = logits.log_softmax(-1)
    cur, mu = logprobs[rows, torch.tensor(sampled)], np.take_along_axis(np.log(q), head, 1)
    out = policy_loss(
        LossInputs(
            learner_logprobs=cur,
            behavior_logprobs=torch.tensor(np.log(q[rows, sampled])),
            advantages=torch.tensor(a),
            loss_mask=torch.ones(TOKENS, dtype=torch.bool),
            sequence_ids=rows // 5,
            proximal_logprobs=cur.detach() if config.edge == "U" else None,
            topk=TopK(rows, logprobs.gather(1, torch.tensor(head)), torch.tensor(mu)),
        ),
        config,
    )
    (slope,) = torch.autograd.grad(out.loss, logits)
    return slope.numpy(), out


def expected(logits: torch.Tensor, q: np.ndarray, head: np.ndarray, sampled: np.ndarray, a: np.ndarray, weight):
    """-A (w_a s_a - sum_v q_v w_v s_v) / T over the whole vocabulary, the rest of q spread as p spreads it."""
    p = softmax(logits.detach().numpy())
    inside = np.zeros(q.shape, bool)
    np.put_along_axis(inside, head, True, 1)
    rest_q, rest_p = ((1 - (each * inside).sum(1, keepdims=True)) for each in (q, p))
    made = np.where(inside, q, p * rest_q / np.where(inside.all(1, keepdims=True), 1, rest_p))
    scores = np.eye(VOCABULARY)[None] - p[:, None]  # [T, v, logit]
    # The weight of the rest is a function of one ratio; that of the sampled token of its own, which is known.
    mean = ((made * weight(p / np.where(made > 0, made, 1), a[:, None]))[..., None] * scores).sum(1)
    rows = np.arange(TOKENS)
    own = weight(p[rows, sampled] / q[rows, sampled], a)[:, None] * scores[rows, sampled]
    return -a[:, None] * (own - mean) / TOKENS


@pytest.mark.parametrize("k", [1, 4, VOCABULARY])
@pytest.mark.parametrize("name", WEIGHTS)
def test_gradient_equals_the_sum_over_the_vocabulary(name: str, k: int) -> None:
    config, weight = WEIGHTS[name]
    for seed in range(4):
        given = setup(seed, k)
        plain, without = gradient(*given, config)
        found, out = gradient(*given, preset_with(config))
        np.testing.assert_allclose(found, expected(*given, weight), atol=1e-12, err_msg=f"seed {seed}")
        assert np.abs(found - plain).max() > 1e-4 and out.loss.item() == pytest.approx(without.loss.item(), abs=1e-12)
        assert out.metrics["centering/removed"] > 0 and 0 < out.metrics["centering/covered"] <= 1 + 1e-9


def preset_with(config: LossConfig) -> LossConfig:
    filled = {key: value for key, value in vars_of(config).items() if key != "preset"}
    return preset(config.preset, **(filled | {"centering": True}))


def vars_of(config: LossConfig) -> dict[str, Any]:
    return {key: value for key in config.__slots__ if (value := getattr(config, key)) is not None and value != {}}


def test_its_mean_under_the_sampler_is_zero_where_the_plain_one_s_is_not() -> None:
    """The expectation over every token that could have been sampled, with the same advantage for all."""
    logits, q, head, sampled, _ = setup(7, VOCABULARY)
    means = []
    for config in (preset("dppo_tv", divergence_low=0.05, divergence_high=0.05), preset("no_correction")):
        for each in (config, preset_with(config)):
            total = np.zeros(q.shape)
            for token in range(VOCABULARY):
                slope, _ = gradient(logits, q, head, np.full_like(sampled, token), np.ones(TOKENS), each)
                total += q[:, token : token + 1] * slope
            means.append(np.abs(total).max())
    assert means[1] < 1e-12 < 1e-3 < means[0] and means[3] < 1e-12 < 1e-3 < means[2]


def test_fewer_than_k_recorded_and_mass_left_out_by_rounding_do_no_harm() -> None:
    logits, q, head, sampled, a = setup(3, VOCABULARY)
    config = preset_with(preset("no_correction"))
    whole, _ = gradient(logits, q, head, sampled, a, config)
    logprobs = logits.log_softmax(-1)
    ids = torch.tensor(head)
    padded = torch.cat([ids, torch.zeros(TOKENS, 3, dtype=torch.int64)], 1)
    mu = torch.tensor(np.take_along_axis(np.log(q), head, 1))
    empty = torch.full((TOKENS, 3), -torch.inf)
    empty[0] = torch.nan
    for dtype, close in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        rows = torch.arange(TOKENS)
        cur = logprobs[rows, torch.tensor(sampled)].to(dtype)
        topk = TopK(rows, logprobs.gather(1, padded).to(dtype), torch.cat([mu, empty], 1).to(dtype))
        inputs = LossInputs(
            learner_logprobs=cur,
            behavior_logprobs=torch.tensor(np.log(q[rows, sampled]), dtype=dtype),
            advantages=torch.tensor(a, dtype=dtype),
            loss_mask=torch.ones(TOKENS, dtype=torch.bool),
            sequence_ids=rows,
            topk=topk,
        )
        (slope,) = torch.autograd.grad(policy_loss(inputs, config).loss, logits, retain_graph=True)
        np.testing.assert_allclose(slope.numpy(), whole, atol=close)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("gspo", {}, "loss.level=geometric"),
        ("seq_tis", {}, "weight_level=sequence"),
        ("tis", {"weight": "self_normalize"}, "self_normalize"),
        ("ppo", {"reject": "k2", "reject_high": 1.0}, "reject=k2 of single tokens"),
        ("a3po", {}, "proximal policy of its own"),
        ("m2po_paper", {}, "does not use loss.centering"),
    ],
)
def test_a_loss_that_it_does_not_fit_refuses_it(name: str, settings: dict, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        preset(name, centering=True, **settings)
    assert said in str(error.value)


@pytest.mark.parametrize(("name", "settings"), [("dppo_tv", {}), ("dppo_kl", {}), ("ppo", {"edge": "E"})])
def test_a_loss_that_stops_tokens_by_the_sign_of_their_advantage_refuses_it(name: str, settings: dict) -> None:
    with pytest.raises(ConfigError, match="stops tokens beyond the trust region depending on the sign"):
        check_loss(preset(name, centering=True, **settings), 1)


def test_the_proximal_log_probs_of_what_was_not_sampled_are_known_for_one_update_alone() -> None:
    check_loss(preset("tis", centering=True), 1)
    check_loss(preset("cispo", edge="E", centering=True), 2)
    with pytest.raises(ConfigError, match=r"learner\.updates_per_batch=1"):
        check_loss(preset("tis", centering=True), 2)
    zero = torch.zeros(1)
    with pytest.raises(ConfigError, match="needs topk in LossInputs"):
        policy_loss(
            LossInputs(zero, zero, zero, torch.ones(1, dtype=torch.bool), zero.long()),
            preset("no_correction", centering=True),
        )
