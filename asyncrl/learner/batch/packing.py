"""Layout of the sequences of a micro-batch in a pack: the siblings of a group share their prompt's tokens.

    pack    [p0 p1 | a0 a1 a2 | b0]        T = 6       prompt, completion a, completion b
    rows    [p0 p1 a0 a1 a2], [p0 p1 b0]   5 + 3 tokens

Every layer except attention computes a shared prompt once; attention reads it from each sibling's row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Int, Int16
from numpy.typing import NDArray
from torch import Tensor

HOST = torch.device("cpu")
SLACK_TOKENS = 16
"""A row at most this much shorter than the longest of a block joins it: another block costs more than the padding."""
SLACK_RATIO = 0.8
"""So does a row at least this fraction as long."""
BLOCK_PAIRS = 8192
"""Pairs of a query and a key that take about as long as the overhead of another block."""


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy the host tensor `tensor` to `device` without waiting for the work queued there.

    The copy is made from pinned memory: only this is copied in parallel to the GPU's work; for other memory the host
    waits.
    """
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


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
class Siblings:
    """Which sequences of a pack share a prompt."""

    leader: NDArray[np.int64]
    """[B] the first sequence with the same prompt, for the first itself too."""
    prompts: NDArray[np.int64]
    """[B] tokens of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Rows of similar length, padded."""

    shapes: tuple[tuple[int, int, int], ...]
    """`(rows, queries, keys)` of each block. The queries of a row are the last of its keys."""
    queries: Gather
    keys: Int[Tensor, " slots"]
    """Packed token of each slot of keys."""
    real: int
    """Number of them that are no padding."""


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
    padded: Blocks
    """The same rows in blocks."""
    pairs: int
    """Pairs of a query and a key that it sees, as attention computes them."""
    shared: Blocks | None = None
    """In place of `padded`, where that is less work; on a CPU only. The queries of a shared prompt stand once: a
    completion is a row that has queries for its own tokens only, and keys for those of its prompt too."""
    routing: Int16[Tensor, "tokens layers k"] | None = None
    """Experts that the routers must choose (`model/routing.py`); -1 is their own choice. None: their own for all
    tokens."""
    sequence: Exchange | None = None
    """With sequence parallelism: how the ranks of a group exchange their tokens for attention."""
    note_window: Callable[[int | None], None] | None = None
    """If given, every layer's attention calls it with its sliding window. It is not a set, because a set would be
    copied: FSDP2 rebuilds every container that it passes to a layer."""

    def slots(self, *, any_length: bool) -> int:
        """Number of tokens, with padding, for which attention holds keys and values; see `Kernel.any_length`."""
        return len(self.rows.index if any_length else (self.shared or self.padded).keys)

    def real(self, *, any_length: bool) -> int:
        """Number of `slots` that are no padding."""
        return int(self.lengths.sum()) if any_length else (self.shared or self.padded).real


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Packed tokens, as a model takes them, and those of them that it scores."""

    input_ids: Int[Tensor, " tokens"]
    position_ids: Int[Tensor, " tokens"]
    loss_positions: Int[Tensor, " chosen"]
    """Indices of the tokens that are scored; the head is applied to no others."""
    predictors: Int[Tensor, " chosen"]
    """Index of the preceding token of each of them in its sequence: its hidden state predicts the token."""
    packing: Packing

    @classmethod
    def of(cls, sequences: Sequence[NDArray[np.int32]], device: torch.device) -> Pack:
        """Sequences that share no prompt, end to end; all tokens but the first of each are scored."""
        lengths = np.array([len(ids) for ids in sequences])
        total = int(lengths.sum())
        positions = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        chosen = np.flatnonzero(positions)
        arrays = (np.concatenate(sequences).astype(np.int64), positions, chosen, chosen - 1)
        ids, places, scored, predictors = (torch.from_numpy(array).to(device) for array in arrays)
        packing = plan_packing(np.arange(total), lengths, total, device)
        return cls(input_ids=ids, position_ids=places, loss_positions=scored, predictors=predictors, packing=packing)


def plan_packing(
    rows: NDArray[np.int64],
    lengths: NDArray[np.int64],
    tokens: int,
    device: torch.device | None = None,
    siblings: Siblings | None = None,
) -> Packing:
    """Plan attention for a pack of `tokens` tokens.

    Args:
        rows: [sum(lengths)] packed index of every token of every sequence, sequence after sequence.
        lengths: [B] tokens per sequence, each at least 1.
        siblings: None if no prompt is shared.
    """
    device = device or HOST
    starts = np.cumsum(lengths) - lengths
    whole = used = _Blocks.of(rows, starts, lengths, np.zeros_like(lengths))
    if siblings is not None and device.type == "cpu":
        apart = _apart(rows, starts, lengths, siblings)
        used = apart if apart is not None and apart.cost < whole.cost else whole
    return Packing(
        cu_seqlens=sent(torch.from_numpy(np.append(starts, lengths.sum()).astype(np.int32)), device),
        max_length=int(lengths.max()),
        lengths=lengths,
        rows=_gather(rows, np.ones(len(rows), dtype=bool), tokens, device),
        padded=whole.sent(tokens, device),
        pairs=used.pairs,
        shared=None if used is whole else used.sent(tokens, device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """Rows of similar length, padded, on the host."""

    shapes: tuple[tuple[int, int, int], ...]
    """See `Blocks`."""
    queries: NDArray[np.int64]
    """Packed token of each slot of queries."""
    real: NDArray[np.bool_]
    """Whether it is no padding."""
    keys: NDArray[np.int64]
    held: int
    """Number of keys that are no padding."""
    pairs: int

    def sent(self, tokens: int, device: torch.device) -> Blocks:
        queries = _gather(self.queries, self.real, tokens, device)
        whole = all(asked == held for _, asked, held in self.shapes)
        keys = queries.index if whole else sent(torch.from_numpy(self.keys), device)
        return Blocks(shapes=self.shapes, queries=queries, keys=keys, real=self.held)

    @property
    def cost(self) -> int:
        return len(self.shapes) * BLOCK_PAIRS + sum(
            count * (queries * keys if keys > queries else queries * keys // 2)  # a plain triangle skips its other half
            for count, queries, keys in self.shapes
        )

    @classmethod
    def of(
        cls,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        skipped: NDArray[np.int64],
    ) -> _Blocks:
        """
        Args:
            starts, lengths: of each row, in `rows`.
            skipped: number of its first tokens that are keys only; the same for all rows of a block.
        """
        shapes: list[tuple[int, int, int]] = []
        queries: list[NDArray[np.int64]] = []
        reals: list[NDArray[np.bool_]] = []
        keys: list[NDArray[np.int64]] = []
        for before in np.unique(skipped):
            these = np.flatnonzero(skipped == before)
            order = these[np.argsort(-lengths[these], kind="stable")]
            for members in _blocks(lengths - before, order):
                column = np.arange(lengths[members[0]])
                real = column < lengths[members][:, None]
                index = rows[np.where(real, starts[members][:, None] + column, starts[members][:, None])]
                shapes.append((len(members), len(column) - int(before), len(column)))
                queries.append(index[:, before:].ravel())
                reals.append(real[:, before:].ravel())
                keys.append(index.ravel())
        return cls(
            shapes=tuple(shapes),
            queries=np.concatenate(queries),
            real=np.concatenate(reals),
            keys=np.concatenate(keys),
            held=int(lengths.sum()),
            pairs=int((lengths * (lengths + 1) // 2 - skipped * (skipped + 1) // 2).sum()),
        )


def _apart(
    rows: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64], siblings: Siblings
) -> _Blocks | None:
    """Each shared prompt as a row of its own, beside the completions; None if no prompt is shared."""
    leader, prompts = siblings.leader, siblings.prompts
    several = (np.bincount(leader, minlength=len(leader))[leader] > 1) & (prompts > 0)
    asked = np.flatnonzero(several & (leader == np.arange(len(leader))))
    if not len(asked):
        return None
    skipped = np.where(several, prompts, 0)
    answered = np.flatnonzero(lengths > skipped)
    return _Blocks.of(
        rows,
        np.concatenate([starts[asked], starts[answered]]),
        np.concatenate([prompts[asked], lengths[answered]]),
        np.concatenate([np.zeros_like(asked), skipped[answered]]),
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


def _gather(index: NDArray[np.int64], real: NDArray[np.bool_], tokens: int, device: torch.device) -> Gather:
    owner = np.empty(tokens, dtype=np.int64)
    slots = np.flatnonzero(real)[::-1]
    owner[index[slots]] = slots  # reversed: the first row of a shared prompt is written last
    return Gather(index=sent(torch.from_numpy(index), device), owner=sent(torch.from_numpy(owner), device))


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
