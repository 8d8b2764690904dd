"""Advantages against loops in numpy, and the identities between them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.advantages import (
    gae,
    gdpo,
    group_advantages,
    length_adaptive_lambda,
    masked_whiten,
    reinforce_plus_plus,
    token_rewards,
    vtrace,
)
from asyncrl.errors import ConfigError

Array = np.ndarray


def tokens(seed: int, rows: int = 5, width: int = 9) -> dict[str, torch.Tensor]:
    """Padded tokens with observation gaps; row 0 is fully masked, row 1 has one token, row 2 has no gaps."""
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, width)) < 0.7
    mask[0] = False
    mask[1] = np.arange(width) == 3
    mask[2] = True
    values = {name: torch.tensor(rng.standard_normal((rows, width))) for name in ("rewards", "values", "log_ratio")}
    return {**values, "mask": torch.tensor(mask)}


def poison(case: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """NaN wherever the mask says nothing is read."""
    mask = case["mask"]
    return {k: v if k == "mask" else torch.where(mask, v, torch.full_like(v, float("nan"))) for k, v in case.items()}


@pytest.mark.parametrize("std", ["none", "group", "batch"])
@pytest.mark.parametrize("baseline", ["mean", "loo", "opo", "none"])
def test_group_advantages_against_a_loop(baseline: str, std: str) -> None:
    rng = np.random.default_rng(0)
    ids = np.array([7, 3, 7, 3, 3, 7, 9, 7])
    rewards, lengths = rng.standard_normal(8), rng.integers(1, 20, 8)
    expected = np.zeros(8)
    for n in range(8):
        members = np.flatnonzero(ids == ids[n])
        r, size = rewards[members], len(members)
        if size == 1:
            expected[n] = rewards[n] if baseline == "none" and std != "group" else 0.0
        elif baseline == "mean":
            expected[n] = rewards[n] - r.mean()
        elif baseline == "loo":
            expected[n] = rewards[n] - (r.sum() - rewards[n]) / (size - 1)
        elif baseline == "opo":
            expected[n] = rewards[n] - (lengths[members] * r).sum() / lengths[members].sum()
        else:
            expected[n] = rewards[n]
        if std == "group" and size > 1:
            expected[n] /= r.std(ddof=1) + 1e-3
        if std == "batch":
            expected[n] /= rewards.std(ddof=1) + 1e-3
    got = group_advantages(
        torch.tensor(rewards), torch.tensor(ids), baseline, std, lengths=torch.tensor(lengths), eps=1e-3
    )
    np.testing.assert_allclose(got.numpy(), expected)


def test_equal_rewards_give_no_advantage() -> None:
    for std in ("none", "group", "batch"):
        assert not group_advantages(torch.ones(4), torch.zeros(4, dtype=torch.long), std=std).any()


def test_one_sample_alone_gives_no_advantage_and_no_nan() -> None:
    for baseline in ("mean", "loo", "opo"):
        for std in ("none", "group", "batch"):
            got = group_advantages(torch.tensor([3.0]), torch.tensor([0]), baseline, std, lengths=torch.tensor([5]))
            assert got.tolist() == [0.0]


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"advantage.baseline.*mean, loo, opo, none.*'median'"):
        group_advantages(torch.ones(2), torch.zeros(2).long(), "median")
    with pytest.raises(ConfigError, match=r"advantage.std.*'all'"):
        group_advantages(torch.ones(2), torch.zeros(2).long(), std="all")
    with pytest.raises(ConfigError, match="pass lengths"):
        group_advantages(torch.ones(2), torch.zeros(2).long(), "opo")
    with pytest.raises(ConfigError, match="alpha"):
        length_adaptive_lambda(torch.ones(1, 3), alpha=0.0)


def whitened(x: Array, mask: Array) -> Array:
    inside = x[mask]
    return np.where(mask, (x - inside.mean()) / np.sqrt(max(inside.var(), 1e-8)), 0.0)


def test_reinforce_plus_plus_whitens_returns_to_go_over_sampled_tokens() -> None:
    case = poison(tokens(1))
    rewards, mask = case["rewards"].numpy(), case["mask"].numpy()
    returns = np.zeros_like(rewards)
    for b in range(len(rewards)):
        running = 0.0
        for t in reversed(range(rewards.shape[1])):
            if mask[b, t]:
                running = rewards[b, t] + 0.9 * running
            returns[b, t] = running
    got = reinforce_plus_plus(case["rewards"], case["mask"], gamma=0.9)
    np.testing.assert_allclose(got.numpy(), whitened(returns, mask), atol=1e-12)


def test_reinforce_plus_plus_baseline_subtracts_the_group_mean() -> None:
    case = poison(tokens(2))
    mask = case["mask"].numpy()
    ids = np.array([0, 0, 1, 1, 1])
    scores = np.where(mask, case["rewards"].numpy(), 0.0).sum(1)
    centred = scores - np.array([scores[ids == i].mean() for i in ids])
    got = reinforce_plus_plus(case["rewards"], case["mask"], group_ids=torch.tensor(ids))
    np.testing.assert_allclose(got.numpy(), whitened(np.repeat(centred[:, None], 9, 1), mask), atol=1e-12)


def gae_by_definition(case: dict[str, torch.Tensor], gamma: float, lam: Array) -> Array:
    """sum_k (gamma lam)^k delta over the row's sampled tokens, as if the others were not there."""
    rewards, values, mask = (case[k].numpy() for k in ("rewards", "values", "mask"))
    out = np.zeros_like(rewards)
    for b in range(len(rewards)):
        at = np.flatnonzero(mask[b])
        r, v = rewards[b, at], np.append(values[b, at], 0.0)
        delta = r + gamma * v[1:] - v[:-1]
        for j, t in enumerate(at):
            out[b, t] = sum((gamma * lam[b]) ** (k - j) * delta[k] for k in range(j, len(at)))
    return out


def test_gae_skips_observation_tokens() -> None:
    for seed in range(3):
        case = poison(tokens(seed))
        expected = gae_by_definition(case, 0.97, np.full(5, 0.9))
        advantages, returns = gae(case["rewards"], case["values"], case["mask"], gamma=0.97, lam=0.9)
        np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-12)
        inside = case["mask"]
        torch.testing.assert_close(returns[inside], (advantages + case["values"])[inside])
        assert not returns[~inside].any()


def test_gae_accepts_float_masks_and_one_lambda_per_sequence() -> None:
    case = tokens(4)
    lam = length_adaptive_lambda(case["mask"], alpha=1.5)
    lengths = case["mask"].sum(1).numpy()
    np.testing.assert_allclose(lam.numpy(), 1 - 1 / np.maximum(1.5 * lengths, 1.0), rtol=1e-6)
    advantages, _ = gae(case["rewards"], case["values"], case["mask"].double(), 1.0, lam.double())
    np.testing.assert_allclose(advantages.numpy(), gae_by_definition(case, 1.0, lam.double().numpy()), atol=1e-12)


def vtrace_by_definition(case: dict[str, torch.Tensor], gamma: float, c_bar: float) -> tuple[Array, Array]:
    """The paper's double sum (lambda 1): v_s = V_s + sum_t gamma^(t-s) (prod c) delta_t, over sampled tokens."""
    rewards, values, log_ratio, mask = (case[k].numpy() for k in ("rewards", "values", "log_ratio", "mask"))
    advantages, targets = np.zeros_like(rewards), np.zeros_like(rewards)
    for b in range(len(rewards)):
        at = np.flatnonzero(mask[b])
        ratio = np.exp(log_ratio[b, at])
        rho, c = np.minimum(ratio, 1.0), np.minimum(ratio, c_bar)
        r, v = rewards[b, at], np.append(values[b, at], 0.0)
        delta = rho * (r + gamma * v[1:] - v[:-1])
        target = np.zeros(len(at) + 1)
        for s in range(len(at)):
            target[s] = v[s] + sum(gamma ** (t - s) * np.prod(c[s:t]) * delta[t] for t in range(s, len(at)))
        targets[b, at] = target[:-1]
        advantages[b, at] = rho * (r + gamma * target[1:] - v[:-1])
    return advantages, targets


@pytest.mark.parametrize("c_bar", [1.0, 1.5])
def test_vtrace_is_the_double_sum_of_the_paper(c_bar: float) -> None:
    for seed in range(3):
        case = poison(tokens(seed))
        got = vtrace(case["rewards"], case["values"], case["log_ratio"], case["mask"], gamma=0.95, c_bar=c_bar)
        for mine, expected in zip(got, vtrace_by_definition(case, 0.95, c_bar), strict=True):
            np.testing.assert_allclose(mine.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_vtrace_on_policy_is_gae(lam: float) -> None:
    case = tokens(3)
    on_policy = torch.zeros_like(case["log_ratio"])
    advantages, targets = vtrace(case["rewards"], case["values"], on_policy, case["mask"], gamma=0.9, lam=lam)
    expected, returns = gae(case["rewards"], case["values"], case["mask"], gamma=0.9, lam=lam)
    torch.testing.assert_close(targets, returns)
    torch.testing.assert_close(advantages, expected)


def test_lambda_one_gives_n_step_returns() -> None:
    case = tokens(5)
    rewards, mask = case["rewards"].numpy(), case["mask"].numpy()
    expected = np.zeros_like(rewards)
    for b in range(len(rewards)):
        at = np.flatnonzero(mask[b])
        for j, t in enumerate(at):
            expected[b, t] = sum(0.9 ** (k - j) * rewards[b, at[k]] for k in range(j, len(at)))
    on_policy = torch.zeros_like(case["log_ratio"])
    _, targets = vtrace(case["rewards"], case["values"], on_policy, case["mask"], gamma=0.9, lam=1.0)
    _, returns = gae(case["rewards"], case["values"], case["mask"], gamma=0.9, lam=1.0)
    np.testing.assert_allclose(targets.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(returns.numpy(), expected, atol=1e-12)


def test_extreme_ratios_stay_finite() -> None:
    case = tokens(6)
    for scale in (1e6, -1e6):
        got = vtrace(case["rewards"], case["values"], case["log_ratio"].abs() * scale, case["mask"], c_bar=5.0)
        assert all(part.isfinite().all() for part in got)


def test_a_discount_counts_sampled_tokens_only() -> None:
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    values = torch.zeros(1, 4)
    gaps = torch.tensor([[True, False, False, True]])
    advantages, _ = gae(rewards, values, gaps, gamma=0.5, lam=1.0)
    assert advantages.tolist() == [[0.5, 0.0, 0.0, 1.0]]


def test_gdpo_adds_z_scores_of_the_components_and_whitens() -> None:
    rng = np.random.default_rng(1)
    rewards, ids = rng.standard_normal((6, 2)), np.array([0, 0, 0, 1, 1, 1])
    total = np.zeros(6)
    for g in (0, 1):
        r = rewards[ids == g]
        total[ids == g] = ((r - r.mean(0)) / (r.std(0, ddof=1) + 1e-6)) @ [1.0, 0.5]
    expected = (total - total.mean()) / (total.std(ddof=1) + 1e-6)
    got = gdpo(torch.tensor(rewards), torch.tensor(ids), torch.tensor([1.0, 0.5]))
    np.testing.assert_allclose(got.numpy(), expected)
    assert gdpo(torch.ones(1, 2), torch.zeros(1).long()).tolist() == [0.0]


def test_token_rewards_charge_every_token_and_pay_at_the_last() -> None:
    mask = torch.tensor([[True, False, True, False], [False, False, False, False]])
    learner, ref = torch.full((2, 4), -1.0).double(), torch.full((2, 4), -1.5).double()
    got = token_rewards(torch.tensor([2.0, 5.0]).double(), mask, 0.1 * (learner - ref))
    np.testing.assert_allclose(got.numpy(), [[-0.05, 0.0, 1.95, 0.0], [0.0, 0.0, 0.0, 0.0]])


def test_whitening_an_empty_mask_gives_zeros() -> None:
    assert not masked_whiten(torch.randn(2, 3), torch.zeros(2, 3)).any()
