"""Computes x_t = a_t + b_t x_{t+1} over the sampled tokens of all sequences, in some hundred steps of Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stream:
    """The sampled tokens of [B, T] rows as one stream [N], sequence after sequence, without the tokens between."""

    at: Int[Tensor, " N"] | None
    """Where the tokens are in the flattened table; None if all tokens of the table were sampled."""
    lengths: Int[Tensor, " B"]
    last: Int[Tensor, " S"]
    """Where in the stream the last token of each sequence is that has any."""

    @classmethod
    def of(cls, mask: Tensor) -> Stream:
        inside = mask.bool()
        rows, width = inside.shape
        begins = torch.arange(rows + 1, device=inside.device) * width
        at = None if int(inside.count_nonzero()) == inside.numel() else inside.reshape(-1).nonzero()[:, 0]
        lengths = (begins if at is None else torch.searchsorted(at, begins)).diff()
        return cls(at, lengths, lengths.cumsum(0)[lengths > 0] - 1)

    def take(self, table: Float[Tensor, "B T"]) -> Float[Tensor, " N"]:
        """May share memory with `table`. Values outside the mask are not read."""
        flat = table.reshape(-1)
        return flat if self.at is None else flat.index_select(0, self.at)

    def put(self, stream: Float[Tensor, " N"], table: Float[Tensor, "B T"]) -> None:
        """The inverse of `take`: write `stream` into `table`, which must be contiguous, and 0 outside the mask."""
        if self.at is None:
            table.view(-1).copy_(stream)
        else:
            table.zero_().view(-1).index_copy_(0, self.at, stream.to(table.dtype))

    def following(self, stream: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """The value of the sequence's next token; 0 after its last."""
        return self.ending(torch.cat([stream[1:], stream[:1]]))

    def ending(self, factors: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """`factors`, changed to 0 at the last token of each sequence, so that `scan` begins anew there."""
        return factors.index_fill_(0, self.last, 0.0)

    def factors(self, each: float | Float[Tensor, " B"], like: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Factors of `scan`: one number for all tokens, or one for each sequence."""
        if isinstance(each, Tensor):
            return self.ending(each.to(like).repeat_interleave(self.lengths, output_size=len(like)))
        return self.ending(torch.full_like(like, each))


SLOTS = 1 << 18
"""Elements of a table processed at a time: 2 MiB in float64. Temporaries then stay in the cache, in memory that is
already allocated: page faults for new memory would cost more than all arithmetic."""


def by_rows(
    mask: Tensor, like: Float[Tensor, "B T"], estimate: Callable[[slice, Stream], tuple[Tensor, ...]], count: int
) -> tuple[Tensor, ...]:
    """Return `count` tables [B, T], built from what `estimate` returns for chunks of rows; 0 outside the mask."""
    tables = tuple(_fresh(like) for _ in range(count))
    height = max(1, SLOTS // max(1, mask.shape[1]))
    for start in range(0, len(mask), height):
        rows = slice(start, start + height)
        stream = Stream.of(mask[rows])
        for table, part in zip(tables, estimate(rows, stream), strict=True):
            stream.put(part, table[rows])
    return tables


def _fresh(like: Tensor) -> Tensor:
    """A table to be filled; on a CPU in huge pages, which numpy asks the system for and torch does not. Two fresh
    tables in pages of 4 KiB would take about as long as the computation of what goes into them."""
    if not like.is_cpu or not like.numel():
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return torch.from_numpy(np.empty(like.numel() * like.element_size(), np.uint8)).view(like.dtype).view(like.shape)


BLOCK = 32
"""Tokens that `scan` takes one by one, in all blocks at once."""


def scan(terms: Float[Tensor, " N"], factors: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """x_t = terms_t + factors_t x_{t+1}, with x = 0 after the last token; a factor of 0 ends a sequence, also for a NaN
    or an infinity of the next one."""
    x = _in_blocks(terms, factors)
    # 0 times NaN is NaN: without this, one bad sequence would look as if all before it were bad, too.
    return x if bool(x.sum().isfinite()) else _one_by_one(terms, factors)


def _in_blocks(terms: Float[Tensor, " N"], factors: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """With tokens across blocks contiguous in memory, one step of Python takes one token of every block: first only for
    what each block begins with if nothing follows it and for the product of its factors. Their scan, the same one size
    smaller, says what follows each block, which is then scanned token by token. Factors are only multiplied, never
    divided, so zero or tiny factors lose no precision."""
    if len(terms) <= 4 * BLOCK:
        return _one_by_one(terms, factors)
    blocks = -(-len(terms) // BLOCK)
    table, f = _across(terms, blocks), _across(factors, blocks).unbind()
    x = table.unbind()
    first, reach = x[-1].clone(), f[-1].clone()
    for k in range(BLOCK - 2, -1, -1):
        torch.addcmul(x[k], f[k], first, out=first)
        reach.mul_(f[k])
    x[-1][:-1].addcmul_(f[-1][:-1], _in_blocks(first, reach)[1:])
    for k in range(BLOCK - 2, -1, -1):
        x[k].addcmul_(f[k], x[k + 1])
    return table.t().clone(memory_format=torch.contiguous_format).view(-1)[: len(terms)]


def _one_by_one(terms: Float[Tensor, " N"], factors: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    x, ahead = terms.tolist(), 0.0
    for t, factor in reversed(list(enumerate(factors.tolist()))):
        ahead = x[t] = x[t] + factor * ahead if factor else x[t]
    return terms.new_tensor(x)


def _across(stream: Float[Tensor, " N"], blocks: int) -> Float[Tensor, "BLOCK blocks"]:
    """A copy, in which the k-th tokens of all blocks are side by side; the last block is filled up with zeros."""
    missing = blocks * BLOCK - len(stream)
    filled = torch.nn.functional.pad(stream, (0, missing)) if missing else stream
    return filled.view(blocks, BLOCK).t().clone(memory_format=torch.contiguous_format)
