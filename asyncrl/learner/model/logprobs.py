"""Computes log-probs and entropies of chosen tokens directly from hidden states, without a full fp32 [T, V] matrix."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from asyncrl.learner.batch.support import Support
from asyncrl.learner.memory_plan import head_backward_rows, head_rows

NO_CHANCE = -1000.0
"""A log-prob whose probability is 0 even in float64."""


def token_logprobs(
    hidden: Float[Tensor, "tokens width"],
    weight: Float[Tensor, "vocabulary width"],
    bias: Float[Tensor, " vocabulary"] | None,
    targets: Tensor,
    temperature: float,
    support: Support | None = None,
    *,
    through_entropy: bool = False,
    wide: bool = False,
) -> tuple[Tensor, Float[Tensor, " tokens"]]:
    """log softmax(hidden @ weight.T + bias, / temperature)[targets] and the entropy of that distribution, both fp32.

    With a `support` the softmax of each token is over its support: log p(a) - log p(support), and the entropy is that
    of the renormalised distribution. The gradient is exact, and zero at the logits outside.

    float64 hidden states stay float64 (for tests); any other dtype is multiplied as it is, and the product converted to
    fp32. Differentiable in hidden, weight and bias through the log-probs and, if requested, through the entropy.

    Args:
        targets: [tokens], or [tokens, columns] for the log-probs of several tokens of each distribution.
        through_entropy: the entropy has a gradient; otherwise it is only a diagnostic.
        wide: see `model.fp32_head`. The gradient of the weight is accumulated in fp32 in any case.
    """
    if wide:
        hidden, weight, bias = _widened(hidden, weight, bias)
    return _ChunkedLogprobs.apply(hidden, weight, bias, targets, temperature, support, through_entropy)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def judged_logprobs(
    hidden: Float[Tensor, "tokens width"],
    weight: Float[Tensor, "vocabulary width"],
    bias: Float[Tensor, " vocabulary"] | None,
    targets: Int[Tensor, " tokens"],
    temperature: float,
    *,
    wide: bool = False,
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-probs bitwise as `token_logprobs`, whether each target is a most likely token (ties count), and the largest
    |logit / temperature| of its distribution."""
    if wide:
        hidden, weight, bias = _widened(hidden, weight, bias)
    logprobs, largest = (torch.empty(len(targets), dtype=_wide(hidden), device=hidden.device) for _ in range(2))
    likeliest = torch.empty(len(targets), dtype=torch.bool, device=hidden.device)
    for rows in _chunks(len(targets), head_rows(len(weight))):
        logits = _logits(hidden, weight, bias, temperature, None, rows)
        chosen = logits.gather(-1, targets[rows, None])[:, 0]
        logprobs[rows] = chosen - logits.logsumexp(-1)
        lowest, highest = logits.aminmax(dim=-1)
        likeliest[rows], largest[rows] = chosen >= highest, highest.maximum(-lowest)
    return logprobs, likeliest, largest


def _chunks(tokens: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, tokens, rows)]


def _columns(values: Tensor, rows: slice) -> Tensor:
    """[rows, columns] of `values` [tokens] or [tokens, columns]."""
    return values[rows, None] if values.ndim == 1 else values[rows]


def _widened(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The factors in fp32, for a model that computes in a narrower dtype (`asyncrl.fp32_head`)."""
    dtype = _wide(hidden)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    support: Support | None,
    rows: slice,
) -> Tensor:
    """Logits of tokens `rows`."""
    logits = functional.linear(hidden[rows], weight, bias).to(_wide(hidden))
    if temperature != 1.0:
        logits = logits.div_(temperature)
    return logits if support is None else support.narrow(logits, rows)


class _ChunkedLogprobs(torch.autograd.Function):
    """The forward keeps one log-normaliser per token; the backward recomputes each chunk's logits, in place."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        support: Support | None,
        through_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(targets.shape, dtype=_wide(hidden), device=hidden.device)
        entropy, normaliser = (logprobs.new_empty(len(targets)) for _ in range(2))
        for rows in _chunks(len(targets), head_rows(len(weight))):
            logits = _logits(hidden, weight, bias, temperature, support, rows)
            normaliser[rows] = logits.logsumexp(-1)
            chosen = logits.gather(-1, _columns(targets, rows)) - normaliser[rows, None]
            logprobs[rows] = chosen.view_as(logprobs[rows])
            mean_logit = torch.linalg.vecdot(functional.softmax(logits, -1), logits)
            entropy[rows] = normaliser[rows] - mean_logit
        ctx.temperature, ctx.support = temperature, support
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy if through_entropy else None)
        if not through_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None, None]:
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape, dtype=_wide(hidden), device=weight.device)
        d_bias = None if bias is None else torch.zeros(bias.shape, dtype=_wide(hidden), device=bias.device)
        plain = ctx.support is None and entropy is None
        each = head_backward_rows(len(weight), hidden.device.type, plain=plain)
        for rows in _chunks(len(targets), each):
            logits = _logits(hidden, weight, bias, ctx.temperature, ctx.support, rows)
            scale = _columns(gradients[0], rows) / ctx.temperature
            logits.sub_(normaliser[rows, None])
            factor = -scale.sum(-1, keepdim=True)
            if entropy is not None:  # d entropy / d logit = -p (log p + entropy)
                rise = gradients[1][rows, None] / ctx.temperature
                # Logits outside a support are the lowest number: times a gradient they would be infinite, and 0 * inf
                # is NaN.
                factor = factor - rise * (logits.clamp(min=NO_CHANCE) + entropy[rows, None])
            d_logits = logits.exp_().mul_(factor)
            d_logits.scatter_add_(-1, _columns(targets, rows), scale)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(hidden.dtype)
            d_hidden[rows] = d_logits @ weight
            if hidden.dtype == d_weight.dtype:
                d_weight.addmm_(d_logits.t(), hidden[rows])
            else:
                d_weight += d_logits.t() @ hidden[rows]
            del logits, d_logits  # otherwise they would still be allocated while the next chunk's are made
        d_bias = None if d_bias is None else d_bias.to(weight.dtype)
        return d_hidden, d_weight.to(weight.dtype), d_bias, None, None, None, None
