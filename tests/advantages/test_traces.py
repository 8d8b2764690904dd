"""Retrace, its identities with GAE and V-trace, and traces cut once per turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.advantages import gae, retrace, segment_log_ratio, vtrace
from tests.advantages.test_estimators import poison, tokens

Array = np.ndarray


def retrace_by_definition(case: dict[str, torch.Tensor], gamma: float, lam: float, c_bar: float) -> Array:
    """sum_k gamma^(k-t) (prod_{t < j <= k} lam min(c_bar, ratio_j)) delta_k over the row's sampled tokens."""
    rewards, values, log_ratio, mask = (case[k].numpy() for k in ("rewards", "values", "log_ratio", "mask"))
    out = np.zeros_like(rewards)
    for b in range(len(rewards)):
        at = np.flatnonzero(mask[b])
        r, v = rewards[b, at], np.append(values[b, at], 0.0)
        c = lam * np.minimum(np.exp(log_ratio[b, at]), c_bar)
        delta = r + gamma * v[1:] - v[:-1]
        for j, t in enumerate(at):
            out[b, t] = sum(gamma ** (k - j) * np.prod(c[j + 1 : k + 1]) * delta[k] for k in range(j, len(at)))
    return out


@pytest.mark.parametrize(("lam", "c_bar"), [(1.0, 1.0), (0.9, 1.7), (0.5, 0.8)])
def test_retrace_is_the_sum_over_products_of_capped_ratios(lam: float, c_bar: float) -> None:
    for seed in range(3):
        case = poison(tokens(seed))
        got, targets = retrace(
            case["rewards"], case["values"], case["log_ratio"], case["mask"], gamma=0.95, lam=lam, c_bar=c_bar
        )
        np.testing.assert_allclose(got.numpy(), retrace_by_definition(case, 0.95, lam, c_bar), atol=1e-12)
        assert not targets[~case["mask"]].any()


def test_retrace_on_policy_is_gae_and_bootstraps_alike() -> None:
    case = tokens(3)
    on_policy = torch.zeros_like(case["log_ratio"])
    for got, expected in zip(
        retrace(case["rewards"], case["values"], on_policy, case["mask"], gamma=0.9, lam=0.8),
        gae(case["rewards"], case["values"], case["mask"], gamma=0.9, lam=0.8),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


def test_value_targets_of_retrace_are_those_of_vtrace_with_equal_caps() -> None:
    case = tokens(4)
    arguments = (case["rewards"], case["values"], case["log_ratio"], case["mask"])
    _, targets = retrace(*arguments, gamma=0.95, lam=0.7, c_bar=1.3)
    _, expected = vtrace(*arguments, gamma=0.95, lam=0.7, rho_bar=1.3, c_bar=1.3)
    torch.testing.assert_close(targets, expected)


def test_a_higher_cap_lets_credit_travel_further() -> None:
    """Noise of rms 0.1 per token: min(1, ratio) loses most of a reward over 100 tokens, c_bar 1.2 does not."""
    noise = 0.1 * torch.randn(64, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rewards, values = torch.zeros_like(noise), torch.zeros_like(noise)
    rewards[:, -1] = 1.0
    mask = torch.ones_like(noise, dtype=torch.bool)
    first = {c: retrace(rewards, values, noise, mask, lam=1.0, c_bar=c)[0][:, 0].mean().item() for c in (1.0, 1.2)}
    turns = segment_log_ratio(noise, mask)
    by_turn = retrace(rewards, values, noise, mask, lam=1.0, trace_log_ratio=turns)[0][:, 0].mean().item()
    assert first[1.0] < 0.1 < 0.5 < first[1.2]
    assert by_turn > 5 * first[1.0]


def test_a_turn_counts_with_the_mean_of_its_own_tokens() -> None:
    mask = torch.tensor([[True, True, False, True, True, True], [False, False, True, False, True, False]])
    log_ratio = torch.tensor([[1.0, 3.0, 9.0, -3.0, 0.0, 6.0], [float("nan"), 7.0, 4.0, 7.0, -4.0, 7.0]])
    got = segment_log_ratio(log_ratio, mask)
    expected = [[2.0, 2.0, 0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 4.0, 0.0, -4.0, 0.0]]
    assert got.tolist() == expected
    one = segment_log_ratio(log_ratio, mask, torch.zeros(2, 6, dtype=torch.long))
    np.testing.assert_allclose(one[0].numpy(), np.where(mask[0], 7 / 5, 0.0), rtol=1e-6)
    assert not one[1].any()


def test_traces_by_turn_are_cut_by_the_ratio_of_the_whole_turn() -> None:
    case = tokens(2)
    case["mask"][:] = True
    turns = segment_log_ratio(case["log_ratio"], case["mask"])
    product = np.exp(np.minimum(turns.numpy(), 0.0)).prod(1)
    np.testing.assert_allclose(product, np.minimum(1.0, np.exp(case["log_ratio"].numpy().sum(1))))


def definition_with_its_own_trace(case: dict[str, torch.Tensor], estimator: str) -> tuple[Array, Array]:
    """Both papers' double sums, the trace's c from `trace` and every other ratio from `log_ratio`.

    gamma 0.95, lambda 0.8, c_bar 1.2; V-trace with rho_bar 1.5 and pg_rho_bar 0.9.
    """
    rewards, values, log_ratio, trace, mask = (
        case[k].numpy() for k in ("rewards", "values", "log_ratio", "trace", "mask")
    )
    advantages, targets = np.zeros_like(rewards), np.zeros_like(rewards)
    for b in range(len(rewards)):
        at = np.flatnonzero(mask[b])
        ratio, c = np.exp(log_ratio[b, at]), 0.8 * np.minimum(np.exp(trace[b, at]), 1.2)
        r, v = rewards[b, at], np.append(values[b, at], 0.0)
        delta, n = r + 0.95 * v[1:] - v[:-1], len(at)
        if estimator == "vtrace":
            rho, target = np.minimum(ratio, 1.5), v.copy()
            for s in range(n):
                target[s] += sum(0.95 ** (t - s) * np.prod(c[s:t]) * rho[t] * delta[t] for t in range(s, n))
            ahead = 0.8 * target[1:] + 0.2 * v[1:]
            advantages[b, at] = np.minimum(ratio, 0.9) * (r + 0.95 * ahead - v[:-1])
            targets[b, at] = target[:-1]
        else:
            for s in range(n):
                total = sum(0.95 ** (t - s) * np.prod(c[s + 1 : t + 1]) * delta[t] for t in range(s, n))
                advantages[b, at[s]], targets[b, at[s]] = total, v[s] + min(ratio[s], 1.2) * total
    return advantages, targets


@pytest.mark.parametrize("estimator", ["vtrace", "retrace"])
def test_a_trace_with_ratios_of_its_own_leaves_the_other_ratios_to_the_token(estimator: str) -> None:
    for seed in range(3):
        case = tokens(seed)
        case = poison({**case, "trace": segment_log_ratio(case["log_ratio"], case["mask"])})
        given = {"gamma": 0.95, "lam": 0.8, "c_bar": 1.2, "trace_log_ratio": case["trace"]}
        arguments = (case["rewards"], case["values"], case["log_ratio"], case["mask"])
        if estimator == "vtrace":
            got = vtrace(*arguments, rho_bar=1.5, pg_rho_bar=0.9, **given)
        else:
            got = retrace(*arguments, **given)
        for mine, expected in zip(got, definition_with_its_own_trace(case, estimator), strict=True):
            np.testing.assert_allclose(mine.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("scale", [1e6, -1e6])
def test_extreme_ratios_stay_finite_and_garbage_outside_the_mask_is_not_read(scale: float) -> None:
    case = poison(tokens(6))
    log_ratio = case["log_ratio"].abs() * scale
    turns = segment_log_ratio(log_ratio, case["mask"])
    for part in retrace(case["rewards"], case["values"], log_ratio, case["mask"], c_bar=5.0, trace_log_ratio=turns):
        assert part.isfinite().all()
        assert not part[~case["mask"]].any()
