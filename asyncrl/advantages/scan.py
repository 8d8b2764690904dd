"""Computes x_t = a_t + b_t x_{t+1} over the sampled tokens of all sequences, in about 2 sqrt(T) steps of Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Columns:
    """The sampled tokens of [B, T] rows, packed and transposed to [L, B]. So each time step is contiguous in memory,
    and the row after a token is the next sampled token, without the observations between."""

    inside: Bool[Tensor, "B T"]
    order: Int[Tensor, "B T"] | None
    """For each row, the indices of its sampled tokens, then of the others; None if they are already in this order."""
    longest: int

    @classmethod
    def of(cls, mask: Tensor) -> Columns:
        inside = mask.bool()
        longest = int(inside.sum(1).max()) if inside.numel() else 0
        if bool((inside[:, 1:] <= inside[:, :-1]).all()):
            return cls(inside, None, longest)
        order = torch.argsort(inside.byte(), dim=1, descending=True, stable=True)
        return cls(inside, order, longest)

    def take(self, table: Float[Tensor, "B T"]) -> Float[Tensor, "L B"]:
        """0 past the end of a sequence. Values outside the mask are not read."""
        known = torch.where(self.inside, table, 0.0)
        return (known if self.order is None else known.gather(1, self.order))[:, : self.longest].t().contiguous()

    def put(self, columns: Float[Tensor, "L B"], table: Float[Tensor, "B T"]) -> None:
        """The inverse of `take`: write columns, which are 0 past the end of a sequence, into `table`."""
        if self.order is None:
            table[:, : self.longest] = columns.t()
            table[:, self.longest :] = 0.0
        else:
            table.zero_().scatter_(1, self.order[:, : self.longest], columns.t())


SLOTS = 1 << 19
"""Elements of a table processed at a time: 4 MiB in float64. Temporaries then stay in the cache, in memory that is
already allocated: page faults for new memory would cost more than all arithmetic."""


def by_rows(
    mask: Tensor, like: Float[Tensor, "B T"], estimate: Callable[[slice, Columns], tuple[Tensor, ...]], count: int
) -> tuple[Tensor, ...]:
    """Return `count` tables [B, T], built from what `estimate` returns for chunks of rows; 0 outside the mask."""
    tables = tuple(torch.empty_like(like) for _ in range(count))
    height = max(1, SLOTS // max(1, mask.shape[1]))
    for start in range(0, len(mask), height):
        rows = slice(start, start + height)
        columns = Columns.of(mask[rows])
        for table, part in zip(tables, estimate(rows, columns), strict=True):
            columns.put(part, table[rows])
    return tables


def following(columns: Float[Tensor, "L B"]) -> Float[Tensor, "L B"]:
    """The value of the next token; 0 after the last."""
    return torch.cat([columns[1:], torch.zeros_like(columns[:1])])


def scan(
    terms: Float[Tensor, "L B"], factors: float | Float[Tensor, " B"] | Float[Tensor, "L B"]
) -> Float[Tensor, "L B"]:
    """x_t = terms_t + factors_t x_{t+1}, with x = 0 after the last token.

    Blocks of sqrt(L) rows are scanned in parallel as if nothing followed them; then, starting from the last block, each
    adds what follows it. Factors are only multiplied, never divided, so zero or tiny factors lose no precision.

    Args:
        factors: one for all tokens, one per sequence, or one per token.
    """
    length, rows = terms.shape
    size = max(1, math.isqrt(length))
    blocks = -(-length // size)
    x = torch.nn.functional.pad(terms, (0, 0, 0, blocks * size - length)).view(blocks, size, rows)
    if x.data_ptr() == terms.data_ptr():
        x = x.clone()
    reach = _factors(factors, terms, blocks, size)
    for k in range(size - 2, -1, -1):
        x[:, k].addcmul_(reach[:, k], x[:, k + 1])
        reach[:, k].mul_(reach[:, k + 1])
    # reach[:, k] is now the product of the factors from token k to the end of its block.
    for block in range(blocks - 2, -1, -1):
        x[block, 0].addcmul_(reach[min(block, len(reach) - 1), 0], x[block + 1, 0])
    if size > 1:
        x[:-1, 1:].addcmul_(reach[:-1, 1:] if len(reach) > 1 else reach[:, 1:], x[1:, :1])
    return x.view(blocks * size, rows)[:length]


def _factors(factors: float | Tensor, terms: Tensor, blocks: int, size: int) -> Float[Tensor, "blocks_or_1 size B"]:
    """A copy of the factors, in blocks; a single block for all if they do not change over time."""
    if isinstance(factors, Tensor) and factors.ndim == 2:
        padded = torch.nn.functional.pad(factors, (0, 0, 0, blocks * size - len(factors)))
        return (padded if padded.data_ptr() != factors.data_ptr() else padded.clone()).view(
            blocks, size, factors.shape[1]
        )
    each = torch.as_tensor(factors, dtype=terms.dtype, device=terms.device)
    return each.expand(1, size, terms.shape[1]).contiguous()
