"""Attention of the siblings of a group to their prompt, whose keys and values are read once for all of them.

    segments    [p0 p1] [a0 a1 a2] [b0]       each attends to itself, causally
    groups      [a0 a1 a2 b0] -> [p0 p1]      completions attend to the whole prompt

A completion's two outputs, over its own tokens and over the prompt's, are softmax averages. By their log-sum-exps they
become that over both: with l = logaddexp(l1, l2), o = exp(l1 - l) o1 + exp(l2 - l) o2. In the backward each part is
that of an ordinary attention whose output and log-sum-exp are o and l (the probabilities are exp(s - l) in either).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from asyncrl.learner.batch.packing import Shared
from asyncrl.learner.model.attention_rows import of_one_width

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""What scaled_dot_product_attention calls on a CPU; it does not return the log-sum-exps."""


def attend_apart(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads value_dim"],
    shared: Shared,
    scale: float,
) -> Float[Tensor, "tokens heads value_dim"]:
    """Causal attention of packed tokens, in which siblings share their prompt. On a CPU."""
    out = _Apart.apply(*of_one_width(q, k, v), shared, scale)
    assert isinstance(out, Tensor)
    return out[..., : v.shape[-1]]


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, shared: Shared, scale: float) -> Tensor:
        alone = [[_rows(each, index, shape) for each in (q, k, v)] for shape, index, _ in _segments(shared)]
        parts = [flash(*tensors, 0.0, True, scale=scale) for tensors in alone]
        owner = shared.segments.rows.owner
        out, lse = (torch.cat([_flat(part[place]) for part in parts]).index_select(0, owner) for place in (0, 1))
        together = [[_row(q, asking), _row(k, held), _row(v, held)] for asking, held in _groups(shared)]
        for (asking, _), tensors in zip(_groups(shared), together, strict=True):
            of_prompt, its = map(_flat, flash(*tensors, 0.0, False, scale=scale))
            own = lse.index_select(0, asking)
            both = torch.logaddexp(own, its)
            shares = [(each - both).exp()[..., None] for each in (own, its)]
            merged = out.index_select(0, asking) * shares[0] + of_prompt * shares[1]
            lse.index_copy_(0, asking, both)
            out.index_copy_(0, asking, merged.to(out.dtype))
        ctx.save_for_backward(out, lse, *itertools.chain(*alone, *together))
        ctx.shared, ctx.scale = shared, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (of_out,), (out, lse, *saved) = gradients, ctx.saved_tensors
        shared, scale, parts, each = ctx.shared, ctx.scale, [], iter(saved)
        kept = zip(each, each, each, strict=True)  # q, k and v of one flash call after another
        for (shape, index, padding), tensors in zip(_segments(shared), kept, strict=False):
            asked, came, sums = (_rows(of_token, index, shape) for of_token in (of_out, out, lse))
            # A slot of padding names a real token, whose gradient is not its own. With an infinite log-sum-exp it has
            # seen nothing; a finite one, of another token, might make its probabilities overflow.
            asked = asked.masked_fill(padding[:, None, :, None], 0.0)
            sums = sums.masked_fill(padding[:, None], torch.inf)
            parts.append(flash_backward(asked, *tensors, came, sums, 0.0, True, scale=scale))
        owner = shared.segments.rows.owner
        found = [torch.cat([_flat(part[place]) for part in parts]).index_select(0, owner) for place in range(3)]
        for (asking, held), tensors in zip(_groups(shared), kept, strict=True):
            asked, came, sums = (_row(of_token, asking) for of_token in (of_out, out, lse))
            more = flash_backward(asked, *tensors, came, sums, 0.0, False, scale=scale)
            for whole, part, index in zip(found, more, (asking, held, held), strict=True):
                whole.index_add_(0, index, _flat(part))
        return *found, None, None


def _segments(shared: Shared) -> Iterator[tuple[tuple[int, int], Tensor, Tensor]]:
    """`(rows, length)` of each block, the packed token of each of its slots, and which [rows, length] are padding."""
    blocks = shared.segments
    slots = [rows * length for rows, length in blocks.shapes]
    for shape, index, real in zip(blocks.shapes, blocks.rows.index.split(slots), shared.real.split(slots), strict=True):
        yield shape, index, ~real.view(shape)


def _groups(shared: Shared) -> Iterator[tuple[Tensor, Tensor]]:
    """Packed tokens that are queries, and keys, of each group."""
    queries, keys = ([shape[place] for shape in shared.shapes] for place in (0, 1))
    return zip(shared.queries.split(queries), shared.keys.split(keys), strict=True)


def _rows(tensor: Tensor, index: Tensor, shape: tuple[int, int]) -> Tensor:
    """[rows, heads, length, ...] of the packed tokens `index` of a [tokens, heads, ...] tensor."""
    return tensor.index_select(0, index).unflatten(0, shape).transpose(1, 2)


def _row(tensor: Tensor, index: Tensor) -> Tensor:
    return _rows(tensor, index, (1, len(index)))


def _flat(rows: Tensor) -> Tensor:
    """Inverse of `_rows`: [rows * length, heads, ...]."""
    return rows.transpose(1, 2).flatten(0, 1)
