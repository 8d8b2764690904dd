from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncrl.learner import memory_plan
from asyncrl.learner.logprobs import token_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunked_logprobs_equal_the_naive_ones_in_value_and_gradient(
    monkeypatch: pytest.MonkeyPatch, temperature: float, with_bias: bool
):
    monkeypatch.setattr(memory_plan, "HEAD_MIN_ROWS", 3)
    monkeypatch.setattr(memory_plan, "HEAD_ELEMENTS", 3)
    exact: Any = {"dtype": torch.float64, "requires_grad": True}
    hidden = torch.randn(11, 16, **exact)
    weight = torch.randn(50, 16, **exact)
    bias = torch.randn(50, **exact) if with_bias else None
    targets = torch.randint(0, 50, (11,))
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    scale = torch.randn(11, dtype=torch.float64)

    chunked, entropy = token_logprobs(hidden, weight, bias, targets, temperature)
    table = (torch.nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    naive = table.gather(-1, targets[:, None])[:, 0]

    torch.testing.assert_close(chunked, naive, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(entropy, -(table.exp() * table).sum(-1), atol=1e-12, rtol=1e-12)
    mine = torch.autograd.grad((chunked * scale).sum(), inputs)
    theirs = torch.autograd.grad((naive * scale).sum(), inputs)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_no_tokens_give_zero_gradients_and_not_none():
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    chosen, _ = token_logprobs(hidden, weight, None, torch.zeros(0, dtype=torch.long), 1.0)
    chosen.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_bfloat16_hidden_states_give_float32_logprobs():
    hidden = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(30, 8, dtype=torch.bfloat16, requires_grad=True)
    chosen, entropy = token_logprobs(hidden, weight, None, torch.arange(5), 1.0)
    chosen.sum().backward()
    assert chosen.dtype == entropy.dtype == torch.float32
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16


def test_several_tokens_of_each_distribution_are_those_one_by_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_plan, "HEAD_MIN_ROWS", 3)
    monkeypatch.setattr(memory_plan, "HEAD_ELEMENTS", 3)
    hidden, weight = (torch.randn(n, 16, dtype=torch.float64, requires_grad=True) for n in (11, 50))
    targets, scale = torch.randint(0, 50, (11, 4)), torch.randn(11, 4, dtype=torch.float64)
    targets[:, 3] = targets[:, 0]  # one of them twice
    several, _ = token_logprobs(hidden, weight, None, targets, 0.6)
    naive = ((hidden @ weight.t()) / 0.6).log_softmax(-1).gather(-1, targets)
    torch.testing.assert_close(several, naive, atol=1e-12, rtol=1e-12)
    mine, theirs = (torch.autograd.grad((each * scale).sum(), (hidden, weight)) for each in (several, naive))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
