"""Layout of the sequences of a micro-batch in a pack: the siblings of a group share their prompt's tokens.

    pack    [p0 p1 | a0 a1 a2 | b0]        T = 6       prompt, completion a, completion b
    rows    [p0 p1 a0 a1 a2], [p0 p1 b0]   5 + 3 tokens

Every layer except attention computes a shared prompt once; attention reads it from each sibling's row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Int, Int16
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.learner.batch.sending import HOST, sent

SLACK_TOKENS = 16
"""A row at most this much shorter than the longest of a block joins it: another block costs more than the padding."""
SLACK_RATIO = 0.8
"""So does a row at least this fraction as long."""


class Exchange(Protocol):
    """See `parallel.sequence.SequenceRanks`."""

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
    """Lengths of the rows, on the host."""
    rows: Gather
    """The rows end to end, for variable-length kernels."""
    blocks: tuple[tuple[int, int], ...]
    """`(rows, length)` of each padded block, in the order of the slots of `padded`."""
    padded: Gather
    routing: Int16[Tensor, "tokens layers k"] | None = None
    """Experts that the routers must choose (`model/routing.py`); -1 is their own choice. None: their own for all
    tokens."""
    sequence: Exchange | None = None
    """With sequence parallelism: how the ranks of a group exchange their tokens for attention."""
    note_window: Callable[[int | None], None] | None = None
    """If given, every layer's attention calls it with its sliding window. It is not a set, because a set would be
    copied: FSDP2 rebuilds every container that it passes to a layer."""

    def slots(self, *, any_length: bool) -> int:
        """Number of tokens, with padding, for which attention holds queries, keys and values; see
        `Kernel.any_length`."""
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
    """Split the sequences, longest first, where padding to the first of the block would cost more than a new block."""
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

    A padding slot refers to its row's first token; causality hides it from the real ones.
    """
    device, total = packing.cu_seqlens.device, len(packing.rows.index)
    starts, lengths = packing.cu_seqlens[:-1].long(), packing.cu_seqlens.diff().long()
    column = torch.arange(packing.max_length, device=device)
    place = starts[:, None] + torch.where(column < lengths[:, None], column, 0)
    row = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths, output_size=total)
    slot = torch.arange(total, device=device) - starts[row] + row * packing.max_length
    return packing.rows.index[place], slot[packing.rows.owner]
