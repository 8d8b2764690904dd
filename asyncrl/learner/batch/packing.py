"""Layout of the sequences of a micro-batch in a pack: the siblings of a group share their prompt's tokens.

    pack    [p0 p1 | a0 a1 a2 | b0]        T = 6       prompt, completion a, completion b
    rows    [p0 p1 a0 a1 a2], [p0 p1 b0]   5 + 3 tokens

Every layer except attention computes a shared prompt once; attention reads it from each sibling's row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Bool, Int, Int16
from numpy.typing import NDArray
from torch import Tensor

HOST = torch.device("cpu")
SLACK_TOKENS = 16
"""A row at most this much shorter than the longest of a block joins it: another block costs more than the padding."""
SLACK_RATIO = 0.8
"""So does a row at least this fraction as long."""
BLOCK_PAIRS = 8192
"""Pairs of a query and a key that take about as long as the overhead of another block, or of another group that shares
its prompt."""


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

    shapes: tuple[tuple[int, int], ...]
    """`(rows, length)` of each block."""
    rows: Gather


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Prompts apart from the completions that share them, so that each prompt's keys and values stand once."""

    segments: Blocks
    """Shared prompts, completions without them, and the other sequences: each attends to itself."""
    real: Bool[Tensor, " slots"]
    """Which slots of the segments are no padding."""
    queries: Int[Tensor, " queries"]
    """Packed tokens of the completions, group after group, that also attend to..."""
    keys: Int[Tensor, " keys"]
    """...those of the prompt of their group, all of them."""
    shapes: tuple[tuple[int, int], ...]
    """`(queries, keys)` of each group."""


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
    shared: Shared | None = None
    """In place of `padded`, where that is less work; on a CPU only, and for layers that see all earlier tokens."""
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
        if any_length or self.shared is None:
            return len((self.rows if any_length else self.padded.rows).index)
        return len(self.shared.segments.rows.index) + len(self.shared.keys)

    def real(self, *, any_length: bool) -> int:
        """Number of `slots` that are no padding."""
        if any_length or self.shared is None:
            return int(self.lengths.sum())
        return int(self.shared.real.sum()) + len(self.shared.keys)


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
    whole = _Blocks.of(rows, starts, lengths)
    groups = _Groups.of(rows, starts, lengths, siblings) if siblings is not None and device.type == "cpu" else None
    apart = groups if groups is not None and groups.cost < whole.cost else None
    return Packing(
        cu_seqlens=sent(torch.from_numpy(np.append(starts, lengths.sum()).astype(np.int32)), device),
        max_length=int(lengths.max()),
        lengths=lengths,
        rows=_gather(rows, np.ones(len(rows), dtype=bool), tokens, device),
        padded=whole.sent(tokens, device),
        pairs=(apart or whole).pairs,
        shared=None if apart is None else apart.sent(tokens, device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """Rows of similar length, padded, on the host."""

    shapes: tuple[tuple[int, int], ...]
    """See `Blocks`."""
    index: NDArray[np.int64]
    """Packed token of each slot."""
    real: NDArray[np.bool_]
    """Whether it is no padding."""
    pairs: int

    @classmethod
    def of(cls, rows: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> _Blocks:
        """
        Args:
            starts, lengths: of each row, in `rows`.
        """
        shapes: list[tuple[int, int]] = []
        indices: list[NDArray[np.int64]] = []
        reals: list[NDArray[np.bool_]] = []
        for members in _blocks(lengths, np.argsort(-lengths, kind="stable")):
            column = np.arange(lengths[members[0]])
            real = column < lengths[members][:, None]
            shapes.append((len(members), len(column)))
            indices.append(rows[np.where(real, starts[members][:, None] + column, starts[members][:, None])].ravel())
            reals.append(real.ravel())
        pairs = int((lengths * (lengths + 1) // 2).sum())
        return cls(shapes=tuple(shapes), index=np.concatenate(indices), real=np.concatenate(reals), pairs=pairs)

    @property
    def cost(self) -> int:
        return sum(BLOCK_PAIRS + count * length * length // 2 for count, length in self.shapes)

    def sent(self, tokens: int, device: torch.device) -> Blocks:
        return Blocks(shapes=self.shapes, rows=_gather(self.index, self.real, tokens, device))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """See `Shared`; on the host."""

    segments: _Blocks
    queries: tuple[NDArray[np.int64], ...]
    keys: tuple[NDArray[np.int64], ...]

    @classmethod
    def of(
        cls, rows: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64], siblings: Siblings
    ) -> _Groups | None:
        """None if no prompt is shared."""
        leader, prompts = siblings.leader, siblings.prompts
        several = (np.bincount(leader, minlength=len(leader))[leader] > 1) & (prompts > 0)
        skipped = np.where(several, prompts, 0)
        answered = lengths > skipped
        asked = np.flatnonzero(several & (leader == np.arange(len(leader))))
        if not len(asked):
            return None
        ends = starts + lengths
        members = {first: np.flatnonzero(answered & (leader == first)) for first in asked}
        # A prompt whose completions are all empty is a row like any other.
        asking = {first: each for first, each in members.items() if len(each)}
        return cls(
            segments=_Blocks.of(
                rows,
                np.concatenate([starts[asked], (starts + skipped)[answered]]),
                np.concatenate([prompts[asked], (lengths - skipped)[answered]]),
            ),
            queries=tuple(
                np.concatenate([rows[starts[i] + prompts[i] : ends[i]] for i in each]) for each in asking.values()
            ),
            keys=tuple(rows[starts[first] : starts[first] + prompts[first]] for first in asking),
        )

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple((len(asking), len(held)) for asking, held in zip(self.queries, self.keys, strict=True))

    @property
    def pairs(self) -> int:
        return self.segments.pairs + sum(math.prod(shape) for shape in self.shapes)

    @property
    def cost(self) -> int:
        return self.segments.cost + sum(BLOCK_PAIRS + math.prod(shape) for shape in self.shapes)

    def sent(self, tokens: int, device: torch.device) -> Shared:
        queries, keys = (
            sent(torch.from_numpy(np.concatenate([np.empty(0, np.int64), *each])), device)
            for each in (self.queries, self.keys)
        )
        real = sent(torch.from_numpy(self.segments.real), device)
        segments = self.segments.sent(tokens, device)
        return Shared(segments=segments, real=real, queries=queries, keys=keys, shapes=self.shapes)


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
