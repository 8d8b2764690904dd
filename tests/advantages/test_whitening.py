"""Whitening by the formula of each convention, and over ranks as over one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.advantages import (
    WHITENINGS,
    masked_whiten,
    reinforce_plus_plus,
    returns_to_go,
    reward_components,
    token_rewards,
    whitening_moments,
)
from asyncrl.errors import ConfigError, RewardError
from tests.advantages.test_estimators import poison, tokens

FORMULAS = {
    "ddof0": lambda x: (x - x.mean()) / np.sqrt(max(x.var(), 1e-8)),
    "ddof1": lambda x: (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8),
    "areal": lambda x: (x - x.mean()) / (x.std() + 1e-5),
}


@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("name", WHITENINGS)
def test_each_convention_is_its_formula(name: str, scale: float) -> None:
    case = poison(tokens(1))
    values, mask = scale * case["rewards"], case["mask"]
    expected = np.zeros(mask.shape)
    expected[mask.numpy()] = FORMULAS[name](values[mask].numpy())
    np.testing.assert_allclose(masked_whiten(values, mask, name).numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("name", WHITENINGS)
def test_ranks_that_add_their_moments_whiten_as_one(name: str) -> None:
    case = poison(tokens(2))
    values, mask = case["rewards"] + 1e4, case["mask"]
    whole = masked_whiten(values, mask, name)
    moments = whitening_moments(values[:2], mask[:2]) + whitening_moments(values[2:], mask[2:])
    parts = [masked_whiten(values[rows], mask[rows], name, moments) for rows in (slice(0, 2), slice(2, None))]
    torch.testing.assert_close(torch.cat(parts), whole)
    np.testing.assert_allclose(whole[mask].numpy(), FORMULAS[name](values[mask].numpy()), rtol=1e-6, atol=1e-6)


def test_reinforce_plus_plus_is_its_two_halves() -> None:
    case = poison(tokens(3))
    returns = returns_to_go(case["rewards"], case["mask"], 0.9)
    torch.testing.assert_close(
        masked_whiten(returns, case["mask"]), reinforce_plus_plus(case["rewards"], case["mask"], 0.9)
    )


@pytest.mark.parametrize("name", WHITENINGS)
def test_too_few_tokens_for_a_variance_give_zeros_and_equal_ones_too(name: str) -> None:
    mask = torch.tensor([[True, False, False]])
    assert masked_whiten(torch.tensor([[3.0, 9.0, 9.0]]), mask, name).tolist() == [[0.0, 0.0, 0.0]]
    assert masked_whiten(torch.full((2, 3), 0.1), torch.ones(2, 3), name).abs().max() < 1e-3


def test_float32_stays_float32_and_unknown_conventions_are_refused() -> None:
    assert masked_whiten(torch.randn(2, 3), torch.ones(2, 3)).dtype == torch.float32
    with pytest.raises(ConfigError, match="ddof0, ddof1, areal; got 'verl'"):
        masked_whiten(torch.randn(2, 3), torch.ones(2, 3), "verl")


def test_token_rewards_without_a_penalty_pay_at_the_last_sampled_token() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert token_rewards(torch.tensor([2.0, 5.0]), mask).tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, 0.0]]


def test_components_become_columns_and_a_missing_one_is_an_error() -> None:
    rows = [{"format": 1.0, "answer": 0.0}, {"answer": 1.0, "format": 0.5}]
    assert reward_components(rows).tolist() == [[0.0, 1.0], [1.0, 0.5]]
    assert reward_components(rows, ["format"]).tolist() == [[1.0], [0.5]]
    assert reward_components([], ["format"]).shape == (0, 1)
    with pytest.raises(RewardError, match=r"trajectory 1 has no reward component answer \(it has: format\)"):
        reward_components([{"answer": 1.0}, {"format": 1.0}])
