"""Causal attention over packed sequences that share their prompts; no padding elsewhere, no mask, no [T, T].

Registered with transformers under `PACKED_ATTENTION`; where each sequence lies travels as the keyword argument
`packing` through the model's forward. The siblings of a group share their prompt's tokens in the pack: every layer but
attention works once on them, and attention reads them from each sibling's row.

    pack    [p0 p1 | a0 a1 a2 | b0]        T = 6       prompt, completion a, completion b
    rows    [p0 p1 a0 a1 a2], [p0 p1 b0]   5 + 3 tokens

On a GPU in half precision the rows go to one variable-length flash call (`attention_kernel`). Elsewhere rows of similar
length form [B, H, L, D] blocks, so the cost is sum(L^2), not T^2.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int, Int16
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from asyncrl.errors import ConfigError
from asyncrl.exact import kernels
from asyncrl.exact.model import valued
from asyncrl.learner.attention_kernel import kernel_of
from asyncrl.learner.sending import HOST, sent

PACKED_ATTENTION = "asyncrl_packed"
EXACT_PACKED_ATTENTION = "asyncrl_packed_exact"
"""The same by the kernels of `engine.exact`."""
SLACK_TOKENS = 16
"""A row at most so much shorter than the longest of a block joins it: one more block costs more than the padding."""
SLACK_RATIO = 0.8
"""So does a row at least this fraction as long."""
REFUSED_KWARGS = {
    "softcap": "a cap on its scores (softcap)",
    "s_aux": "attention sinks (s_aux)",
    "position_bias": "a bias by position (position_bias)",
}
"""Changes to the attention scores that this kernel does not know; ignoring one would train another model."""

FLASH_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Since torch 2.12; before, keys and values are repeated for each query head."""


class UnpackedCall(ConfigError):
    """A model calls the packed attention without the packing, or with a mask of its own."""


class Exchange(Protocol):
    """See `sequence.SequenceRanks`."""

    def to_heads(self, *tensors: Tensor) -> list[Tensor]: ...

    def to_tokens(self, out: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """How packed tokens become rows, and back."""

    index: Int[Tensor, " slots"]
    """Packed token of each slot. A slot of padding names any token: causality hides it from the row's real tokens."""
    owner: Int[Tensor, " tokens"]
    """The slot whose output each packed token takes; for a shared prompt, that of its first row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where the sequences of a micro-batch lie; the same for every layer."""

    cu_seqlens: Int[Tensor, " sequences+1"]
    """int32 cumulative lengths of the rows, 0 first."""
    max_length: int
    lengths: NDArray[np.int64]
    """Of the rows, on the host."""
    rows: Gather
    """Rows end to end, for variable-length kernels."""
    blocks: tuple[tuple[int, int], ...]
    """`(rows, length)` of each padded block, in the order of the slots of `padded`."""
    padded: Gather
    routing: Int16[Tensor, "tokens layers k"] | None = None
    """The experts that routers have to choose (`routing.py`), -1 for their own choice; None: of all tokens."""
    sequence: Exchange | None = None
    """Where the ranks of a group have each some of the tokens: how they come together for attention."""
    note_window: Callable[[int | None], None] | None = None
    """Where given, every layer's attention tells it the sliding window that it is called with. A set would be copied on
    its way: FSDP2 makes every container anew that it hands to a layer."""

    def slots(self, *, any_length: bool) -> int:
        """Tokens that attention holds queries, keys and values of, padding counted; see `Kernel.any_length`."""
        return len((self.rows if any_length else self.padded).index)


def plan_packing(
    rows: NDArray[np.int64], lengths: NDArray[np.int64], tokens: int, device: torch.device | None = None
) -> Packing:
    """Plan attention for a pack of `tokens` tokens.

    Args:
        rows: [sum(lengths)] packed index of every token of every sequence, sequence after sequence.
        lengths: [B] tokens per sequence, each at least 1.
    """
    starts = np.cumsum(lengths) - lengths
    order = np.argsort(-lengths, kind="stable")
    blocks: list[tuple[int, int]] = []
    indices: list[NDArray[np.int64]] = []
    for members in _blocks(lengths, order):
        longest = int(lengths[members[0]])
        column = np.arange(longest)
        inside = column < lengths[members][:, None]
        indices.append(rows[np.where(inside, starts[members][:, None] + column, starts[members][:, None])].ravel())
        blocks.append((len(members), longest))
    padded = np.concatenate(indices)
    real = np.concatenate([np.arange(length) < lengths[order[i]] for i, length in enumerate(_row_lengths(blocks))])
    return Packing(
        cu_seqlens=sent(torch.from_numpy(np.append(starts, lengths.sum()).astype(np.int32)), device or HOST),
        max_length=int(lengths.max()),
        lengths=lengths,
        rows=_gather(rows, np.ones(len(rows), dtype=bool), tokens, device),
        blocks=tuple(blocks),
        padded=_gather(padded, real, tokens, device),
    )


def _blocks(lengths: NDArray[np.int64], order: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Sequences, longest first, cut where the padding to the first of the block would cost more than a new block."""
    descending = lengths[order]
    cuts, first = [], 0
    for i in np.flatnonzero(np.diff(descending)) + 1:
        if descending[first] - descending[i] > SLACK_TOKENS and descending[i] < SLACK_RATIO * descending[first]:
            cuts.append(i)
            first = i
    return np.split(order, cuts)


def _row_lengths(blocks: list[tuple[int, int]]) -> list[int]:
    return [length for rows, length in blocks for _ in range(rows)]


def _gather(index: NDArray[np.int64], real: NDArray[np.bool_], tokens: int, device: torch.device | None) -> Gather:
    owner = np.empty(tokens, dtype=np.int64)
    slots = np.flatnonzero(real)[::-1]
    owner[index[slots]] = slots  # reversed: the first row of a shared prompt is written last
    to = device or HOST
    return Gather(index=sent(torch.from_numpy(index), to), owner=sent(torch.from_numpy(owner), to))


def as_rows(packing: Packing) -> tuple[Int[Tensor, "sequences longest"], Int[Tensor, " tokens"]]:
    """Each sequence as a row, padded at its end: the packed token of every slot, and the slot of every packed token.

    A slot of padding names its row's first token; what is causal hides it from the real ones.
    """
    device, total = packing.cu_seqlens.device, len(packing.rows.index)
    starts, lengths = packing.cu_seqlens[:-1].long(), packing.cu_seqlens.diff().long()
    column = torch.arange(packing.max_length, device=device)
    place = starts[:, None] + torch.where(column < lengths[:, None], column, 0)
    row = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths, output_size=total)
    slot = torch.arange(total, device=device) - starts[row] + row * packing.max_length
    return packing.rows.index[place], slot[packing.rows.owner]


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens head_dim"],
    key: Float[Tensor, "1 kv_heads tokens head_dim"],
    value: Float[Tensor, "1 kv_heads tokens value_dim"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    *,
    exact: bool = False,
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 tokens heads value_dim"], None]:
    """Attention function with the signature transformers calls. Dropout is never applied: the behavior policy had none.

    Raises:
        ConfigError: the model needs something this kernel does not do (a mask, score capping, attention sinks).
    """
    refused = [said for name, said in REFUSED_KWARGS.items() if kwargs.get(name) is not None]
    if packing is None or attention_mask is not None or refused:
        cause = ", ".join(refused) or ("an attention mask" if packing is not None else "a forward without packing")
        raise (ConfigError if refused else UnpackedCall)(
            f"packed attention does not support {cause}, which {type(module).__name__} asks for; "
            "use a plain causal decoder (Llama, Qwen2, Qwen3, Mistral)"
        )
    if packing.note_window is not None:
        packing.note_window(sliding_window)
    if packing.sequence is not None:
        query, key, value = packing.sequence.to_heads(query, key, value)
    flash = kernel_of(query.device, query.dtype, max(query.shape[-1], value.shape[-1])).any_length
    gather = packing.rows if flash else packing.padded
    q, k, v = (tensor[0].transpose(0, 1).index_select(0, gather.index) for tensor in (query, key, value))
    attend = _flash if flash else partial(_blockwise, exact=exact)
    out = attend(q, k, v, packing, scaling, sliding_window)
    out = out.index_select(0, gather.owner)
    return (out if packing.sequence is None else packing.sequence.to_tokens(out))[None], None


def _flash(
    q: Float[Tensor, "slots heads head_dim"],
    k: Float[Tensor, "slots kv_heads head_dim"],
    v: Float[Tensor, "slots kv_heads value_dim"],
    packing: Packing,
    scaling: float | None,
    window: int | None,
) -> Float[Tensor, "slots heads value_dim"]:
    edges, longest = packing.cu_seqlens, packing.max_length
    band = (-1 if window is None else window - 1, 0)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    options: dict[str, Any] = {"scale": scale, "window_size": band}
    groups, value_dim = q.shape[1] // k.shape[1], v.shape[-1]
    # The kernel knows one width for all three (multi-head latent attention has another for its values): zeros add
    # nothing to a product.
    widest = max(q.shape[-1], value_dim)
    q, k, v = (functional.pad(tensor, (0, widest - tensor.shape[-1])) for tensor in (q, k, v))
    if groups > 1 and FLASH_TAKES_GROUPS:
        options["enable_gqa"] = True
    elif groups > 1:
        k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    out = varlen_attn(q, k, v, edges, edges, longest, longest, **options)
    assert isinstance(out, Tensor)
    return out[..., :value_dim]


def _blockwise(
    q: Float[Tensor, "slots heads head_dim"],
    k: Float[Tensor, "slots kv_heads head_dim"],
    v: Float[Tensor, "slots kv_heads value_dim"],
    packing: Packing,
    scaling: float | None,
    window: int | None,
    *,
    exact: bool,
) -> Float[Tensor, "slots heads value_dim"]:
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    outputs, grouped = [], q.shape[1] != k.shape[1]
    sizes = [rows * length for rows, length in packing.blocks]
    parts = zip(packing.blocks, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
    for (rows, length), *tensors in parts:
        bq, bk, bv = (tensor.view(rows, length, *tensor.shape[1:]).transpose(1, 2) for tensor in tensors)
        mask = None if window is None or window >= length else _band(length, window, q.device)
        options: dict[str, Any] = {
            "attn_mask": mask,
            "is_causal": mask is None,
            "scale": scaling,
            "enable_gqa": grouped,
        }
        plain = partial(functional.scaled_dot_product_attention, bq, bk, bv, **options)
        seen = None if mask is None else mask[None, None]
        out = valued(plain, partial(kernels.attention, bq, bk, bv, scale, seen)) if exact else plain()
        outputs.append(out.transpose(1, 2).reshape(rows * length, q.shape[1], v.shape[2]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < window)


# No mask function goes with it: transformers then builds no mask at all for this implementation.
AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionInterface.register(EXACT_PACKED_ATTENTION, partial(packed_attention, exact=True))
