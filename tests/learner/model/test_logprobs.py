from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asyncrl.learner import memory_plan
from asyncrl.learner.batch.support import Support
from asyncrl.learner.model.logprobs import judged_logprobs, token_logprobs


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


@pytest.mark.parametrize("narrowed", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 10, 11, 4096])
def test_chunks_of_the_backward_may_be_of_any_size(rows: int, narrowed: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_plan, "HEAD_MIN_ROWS", 3)
    monkeypatch.setattr(memory_plan, "HEAD_ELEMENTS", 3)
    exact: Any = {"dtype": torch.float64, "requires_grad": True}
    leaves = [torch.randn(shape, **exact) for shape in ((11, 16), (50, 16), (50,))]
    targets, scale = torch.randint(0, 5, (11, 2)), torch.randn(11, 2, dtype=torch.float64)
    counts = np.where(np.arange(11) % 2, 0, 5)
    ids = torch.arange(5).repeat(int((counts > 0).sum()))
    support = Support(counts=counts, ids=ids, bits=torch.zeros(0, 7, dtype=torch.uint8)) if narrowed else None

    def found() -> list[torch.Tensor]:
        chosen, _ = token_logprobs(leaves[0], leaves[1], leaves[2], targets, 0.7, support)
        return [chosen.detach(), *torch.autograd.grad((chosen * scale).sum(), leaves)]

    wanted = found()
    monkeypatch.setattr("asyncrl.learner.model.logprobs.head_backward_rows", lambda *_, **__: rows)
    for mine, theirs in zip(found(), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)


def test_a_gpu_has_larger_chunks_in_the_backward_and_a_cpu_those_of_the_forward():
    rows = {size: memory_plan.head_backward_rows(size, "cuda") for size in (264, 32_000, 128_256, 151_936, 262_144)}
    assert rows == {264: 8192, 32_000: 8192, 128_256: 5120, 151_936: 4352, 262_144: 2560}
    for size in rows:
        assert memory_plan.head_backward_rows(size, "cpu") == memory_plan.head_rows(size)
        assert memory_plan.head_backward_rows(size, "cuda", plain=False) == memory_plan.head_rows(size)


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


def by_hand(
    hidden: NDArray, weight: NDArray, bias: NDArray, inside: NDArray, targets: NDArray, scale: NDArray, rise: NDArray
) -> tuple[NDArray, NDArray, list[NDArray]]:
    """Log-probs, entropy, and the gradients of sum(scale * logprobs) + sum(rise * entropy), at temperature 0.7; with
    z = (h W' + b) / 0.7 and p its softmax over the support: dH/dz_j = -p_j (log p_j + H)."""
    z = (hidden @ weight.T + bias) / 0.7
    p = np.exp(z - z.max(1, keepdims=True)) * inside
    p /= p.sum(1, keepdims=True)
    logp = np.log(np.where(inside, p, 1.0))
    entropy = -(p * logp).sum(1)
    columns = np.take_along_axis(logp, targets, 1)
    d = -p * scale.sum(1, keepdims=True) - rise[:, None] * p * (logp + entropy[:, None])
    for column in range(targets.shape[1]):
        np.add.at(d, (np.arange(len(d)), targets[:, column]), scale[:, column])
    d /= 0.7
    return columns, entropy, [d @ weight, d.T @ hidden, d.sum(0)]


@pytest.mark.parametrize("narrowed", [False, True])
def test_the_entropy_has_the_gradient_that_a_bonus_for_it_needs(narrowed: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_plan, "HEAD_MIN_ROWS", 3)
    monkeypatch.setattr(memory_plan, "HEAD_ELEMENTS", 3)
    rng = np.random.default_rng(0)
    arrays = hidden, weight, bias = [rng.standard_normal(shape) for shape in ((11, 16), (50, 16), (50,))]
    targets = rng.integers(0, 5, (11, 2))
    inside = np.ones((11, 50), dtype=bool)
    support = None
    if narrowed:
        inside[::2, 5:] = False
        counts = np.where(inside.all(1), 0, 5)
        ids = torch.arange(5).repeat(int((counts > 0).sum()))
        support = Support(counts=counts, ids=ids, bits=torch.zeros(0, 7, dtype=torch.uint8))
    scale, rise = rng.standard_normal((11, 2)), 100 * rng.standard_normal(11)
    columns, values, gradients = by_hand(hidden, weight, bias, inside, targets, scale, rise)
    leaves = [torch.tensor(each, requires_grad=True) for each in arrays]
    wanted = torch.tensor(targets)
    found, entropy = token_logprobs(leaves[0], leaves[1], leaves[2], wanted, 0.7, support, through_entropy=True)
    np.testing.assert_allclose(found.detach(), columns, atol=1e-12)
    np.testing.assert_allclose(entropy.detach(), values, atol=1e-12)
    loss = (found * torch.tensor(scale)).sum() + (entropy * torch.tensor(rise)).sum()
    for mine, theirs in zip(torch.autograd.grad(loss, leaves), gradients, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9)


def test_an_entropy_that_nobody_learns_from_has_no_gradient():
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(30, 8)
    _, entropy = token_logprobs(hidden, weight, None, torch.arange(5), 1.0)
    assert not entropy.requires_grad


def test_a_wide_head_gives_the_logprobs_of_the_numbers_that_a_model_in_bfloat16_has():
    torch.manual_seed(0)
    leaves = [torch.randn(n, 64, dtype=torch.bfloat16, requires_grad=True) for n in (40, 300)]
    targets, scale = torch.randint(0, 300, (40,)), torch.randn(40, dtype=torch.float64)
    exact = [each.detach().double().requires_grad_() for each in leaves]
    table = (exact[0] @ exact[1].t()).log_softmax(-1)
    wanted = table.gather(-1, targets[:, None])[:, 0]
    gradients = torch.autograd.grad((wanted * scale).sum(), exact)
    errors, missed = {}, {}
    for wide in (False, True):
        found, _ = token_logprobs(leaves[0], leaves[1], None, targets, 1.0, wide=wide)
        judged, *_ = judged_logprobs(leaves[0], leaves[1], None, targets, 1.0, wide=wide)
        assert torch.equal(found, judged)
        errors[wide] = (found.double() - wanted).abs().max().item()
        mine = torch.autograd.grad((found * scale).sum(), leaves)
        assert all(gradient.dtype == torch.bfloat16 for gradient in mine)
        pairs = zip(mine, gradients, strict=True)
        missed[wide] = max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)
    assert errors[True] < 1e-4 < 1e-2 < errors[False], "logits of 20 and more are rounded to 8 bits"
    assert missed[True] < 0.004 and missed[True] < missed[False], "the gradient is rounded once, at the end"
