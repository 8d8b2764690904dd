"""The learner's path, hidden states -> chunked log-probs -> loss, against the plain one; and what it allocates."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from asyncrl.learner import memory_plan
from asyncrl.learner.model.logprobs import token_logprobs
from asyncrl.losses import LossInputs, policy_loss, preset

TOKENS, WIDTH, VOCABULARY = 37, 16, 101
PRESETS = ("dppo_tv", "grpo", "gspo", "tis", "vespo", "m2po_paper")


def make_case(dtype: torch.dtype, bias: bool) -> tuple[list[Tensor], Tensor, LossInputs]:
    """(leaves: hidden, weight and maybe bias), sampled tokens, and loss inputs that lack the learner's log-probs."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    leaves = [noise(TOKENS, WIDTH), noise(VOCABULARY, WIDTH, scale=0.3), *([noise(VOCABULARY)] if bias else [])]
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    near = plain_logprobs([leaf.double() for leaf in leaves], targets, 0.7).to(dtype)
    sequences = torch.arange(TOKENS) // 6
    inputs = LossInputs(
        learner_logprobs=near,
        behavior_logprobs=near + noise(TOKENS, scale=0.1),
        advantages=noise(TOKENS),
        loss_mask=torch.rand(TOKENS, generator=generator) < 0.8,
        sequence_ids=sequences,
        group_ids=sequences // 2,
        proximal_logprobs=near + noise(TOKENS, scale=0.05),
        ref_logprobs=near + noise(TOKENS, scale=0.2),
        staleness=torch.arange(TOKENS) % 4,
    )
    return [leaf.requires_grad_() for leaf in leaves], targets, inputs


def plain_logprobs(leaves: list[Tensor], targets: Tensor, temperature: float) -> Tensor:
    table = (functional.linear(*leaves) / temperature).log_softmax(-1)
    return table.gather(-1, targets[:, None])[:, 0]


def fused_logprobs(leaves: list[Tensor], targets: Tensor, temperature: float) -> Tensor:
    hidden, weight, bias = (*leaves, None)[:3]
    assert hidden is not None and weight is not None
    return token_logprobs(hidden, weight, bias, targets, temperature)[0]


def loss_and_gradients(of: Any, name: str, dtype: torch.dtype, bias: bool, temperature: float) -> list[Tensor]:
    leaves, targets, inputs = make_case(dtype, bias)
    chosen = of(leaves, targets, temperature)
    kl = {"kl_coef": 0.05} if name == "grpo" else {}
    loss = policy_loss(dataclasses.replace(inputs, learner_logprobs=chosen), preset(name, **kl)).loss
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_the_fused_path_equals_the_plain_one_in_loss_and_every_gradient(
    monkeypatch: pytest.MonkeyPatch, name: str, bias: bool, temperature: float
) -> None:
    monkeypatch.setattr(memory_plan, "HEAD_MIN_ROWS", 5)
    monkeypatch.setattr(memory_plan, "HEAD_ELEMENTS", 1)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        fused = loss_and_gradients(fused_logprobs, name, dtype, bias, temperature)
        plain = loss_and_gradients(plain_logprobs, name, dtype, bias, temperature)
        for mine, theirs in zip(fused, plain, strict=True):
            torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=10 * tolerance)


class Allocations(TorchDispatchMode):
    """Every tensor that an operation makes while this is on: the largest one, and the most bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = self.now = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)}
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in known | set(self.alive):
                self.note(tensor)
        return out

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self.alive[key] = size
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_table_over_tokens_and_vocabulary_ever_exists(dtype: torch.dtype) -> None:
    tokens, vocabulary = 4 * memory_plan.HEAD_MIN_ROWS, 2048
    hidden = torch.randn(tokens, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, 8, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    table = 4 * tokens * vocabulary

    def measure(of: Any) -> Allocations:
        with Allocations() as seen:
            torch.autograd.grad(of([hidden, weight], targets, 0.7).sum(), [hidden, weight])
        return seen

    plain, fused = measure(plain_logprobs), measure(fused_logprobs)
    in_this_dtype = table * dtype.itemsize // 4
    assert plain.largest >= in_this_dtype and plain.peak >= 2 * in_this_dtype, "the probe must see the plain path's"
    assert fused.largest <= table // 4
    assert fused.peak < table


@pytest.mark.parametrize("vocabulary", [32_000, 151_936, 262_144])
@pytest.mark.parametrize(("scored", "wide"), [(20_000, False), (9_000, True), (700, False)])
def test_what_the_head_takes_on_a_gpu_is_what_the_plan_counts(vocabulary: int, scored: int, wide: bool) -> None:
    """On paper: tensors without data, of a device that is no CPU, in the chunks that it would have."""
    hidden, weight = (
        torch.empty(rows, 256, dtype=torch.bfloat16, device="meta", requires_grad=True) for rows in (scored, vocabulary)
    )
    targets = torch.empty(scored, dtype=torch.long, device="meta")
    with Allocations() as seen:
        logprobs, _ = token_logprobs(hidden, weight, None, targets, 0.7, wide=wide)
        torch.autograd.grad(logprobs.sum(), [hidden, weight])
    planned = memory_plan.head_bytes(vocabulary, 256, 2, "cuda", scored, wide=wide)
    assert 0.9 * planned < seen.peak < 1.1 * planned
    rows = memory_plan.head_backward_rows(vocabulary, "cuda")
    assert seen.largest == max(4 * min(rows, scored) * vocabulary, 4 * vocabulary * 256)
