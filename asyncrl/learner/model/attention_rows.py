"""Attention over rows that lie end to end, without padding, by kernels that take rows of any length."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.varlen import varlen_attn

from asyncrl.learner.batch.packing import sent
from asyncrl.learner.model.attention_kernel import FLASH3_CACHED, FLEX, cached_build

FLASH_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""True since torch 2.12; before that, keys and values are repeated for each query head."""
TILE = 128
"""Queries, and keys, of a tile of flex_attention; it computes whole tiles."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Lengths of rows that lie end to end."""

    edges: Int[Tensor, " rows+1"]
    """int32 cumulative lengths, 0 first."""
    longest: int
    lengths: NDArray[np.int64]
    """On the host."""

    @classmethod
    def of(cls, lengths: NDArray[np.int64], device: torch.device) -> Rows:
        edges = torch.from_numpy(np.append(0, lengths.cumsum()).astype(np.int32))
        return cls(edges.to(device), int(lengths.max()), lengths)


def attend(
    kernel: str,
    q: Float[Tensor, "slots heads head_dim"],
    k: Float[Tensor, "slots kv_heads head_dim"],
    v: Float[Tensor, "slots kv_heads value_dim"],
    rows: Rows,
    scale: float,
    window: int | None,
) -> Float[Tensor, "slots heads value_dim"]:
    """Causal attention within each row; a query sees the last `window` keys, its own among them (None: all)."""
    if kernel == FLEX:
        return _flex(q, k, v, rows, scale, window)
    value_dim, band = v.shape[-1], (-1 if window is None else window - 1, 0)
    q, k, v = of_one_width(q, k, v)
    computed = (_cached_flash if kernel == FLASH3_CACHED else _flash)(q, k, v, rows, scale, band)
    return computed[..., :value_dim]


def of_one_width(*tensors: Tensor) -> list[Tensor]:
    """Pad the last dimension with zeros, which add nothing to a product: flash kernels require one width for queries,
    keys and values, but multi-head latent attention has another for its values."""
    widest = max(tensor.shape[-1] for tensor in tensors)
    return [functional.pad(tensor, (0, widest - tensor.shape[-1])) for tensor in tensors]


def _flash(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float, band: tuple[int, int]) -> Tensor:
    options: dict[str, Any] = {"scale": scale, "window_size": band}
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and FLASH_TAKES_GROUPS:
        options["enable_gqa"] = True
    elif groups > 1:
        k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    out = varlen_attn(q, k, v, rows.edges, rows.edges, rows.longest, rows.longest, **options)
    assert isinstance(out, Tensor)
    return out


def _cached_flash(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float, band: tuple[int, int]) -> Tensor:
    out = _cached_kernel()(
        q,
        k,
        v,
        cu_seqlens_q=rows.edges,
        cu_seqlens_k=rows.edges,
        max_seqlen_q=rows.longest,
        max_seqlen_k=rows.longest,
        softmax_scale=scale,
        causal=True,
        window_size=band,
    )
    return out[0] if isinstance(out, tuple) else out  # some builds return the log-sum-exps too


@cache
def _cached_kernel() -> Callable[..., Any]:
    build = cached_build()
    assert build is not None, "chosen only where it is there"
    return importlib.import_module("kernels").get_local_kernel(build).flash_attn_varlen_func


def _flex(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float, window: int | None) -> Tensor:
    compute = _compiled_flex() if q.device.type == "cuda" else flex.flex_attention
    heads_q, heads_k, heads_v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    mask = tiles_of(rows.lengths.tobytes(), window, q.device)
    out = compute(heads_q, heads_k, heads_v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


@cache
def _compiled_flex() -> Callable[..., Any]:
    """Not compiled, it would hold [heads, slots, slots] numbers."""
    return torch.compile(flex.flex_attention, dynamic=True)


@lru_cache(maxsize=4)
def tiles_of(lengths: bytes, window: int | None, device: torch.device) -> flex.BlockMask:
    """The mask of rows of these lengths (int64). Made of the lengths alone: torch's own way computes all pairs first.

    A tile of queries sees those of keys from where the row, or the window, of its first query begins.
    """
    each = np.frombuffer(lengths, np.int64)
    starts, total = np.repeat(each.cumsum() - each, each), int(each.sum())
    first = np.arange(0, total, TILE)
    reach = starts[first] if window is None else np.maximum(starts[first], first - window + 1)
    number = np.arange(len(first))
    lowest = reach // TILE
    count = sent(torch.from_numpy((number - lowest + 1).astype(np.int32)), device)
    index = sent(torch.from_numpy(np.minimum(lowest[:, None] + number, len(first) - 1).astype(np.int32)), device)
    row = sent(torch.from_numpy(np.repeat(np.arange(len(each), dtype=np.int32), each)), device)

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        within = (row[query] == row[key]) & (query >= key)
        return within if window is None else within & (query - key < window)

    return flex.BlockMask.from_kv_blocks(
        count[None, None], index[None, None], BLOCK_SIZE=TILE, mask_mod=seen, seq_lengths=(total, total)
    )
