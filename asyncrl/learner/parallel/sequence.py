"""Sequence parallelism: neighbouring ranks compute a pack together, each with some of its tokens (DeepSpeed-Ulysses,
arXiv 2309.14509).

    rank 0: tokens 0 2 4 .    --- all to all -->   all tokens, heads 0 1    --- all to all -->   tokens 0 2 4 .
    rank 1: tokens 1 3 5 .      q, k, v of         all tokens, heads 2 3      what attention     tokens 1 3 5 .
            every head          its tokens                                    has made of them

Weights are nothing to it: FSDP2 shards them over these ranks as over the others, and adds up the gradients that each
has of its own tokens. What is made of the last layer's states (log-probs, values) is told to all, so that every rank of
the group computes the same loss, of the whole micro-batch. Tokens are dealt out one by one, for the head computes
completions alone: whole stretches would leave it to the rank that has the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from asyncrl.learner.batch.packing import Gather, Packing
from asyncrl.learner.parallel.all_to_all import exchanged
from asyncrl.learner.parallel.collectives import sequence_group


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRanks:
    """The ranks that share each pack, as one of them sees them."""

    group: dist.ProcessGroup
    rank: int
    """Among them."""
    size: int

    @classmethod
    def here(cls) -> SequenceRanks | None:
        """None where every rank has packs of its own."""
        group = sequence_group()
        return None if group is None else cls(group=group, rank=group.rank(), size=group.size())

    def own(self, values: Tensor) -> Tensor:
        """Of [tokens, ...] those of this rank; as many on every rank, the last token again where they do not divide."""
        each = -(-len(values) // self.size)
        places = torch.arange(each, device=values.device) * self.size + self.rank
        return values.index_select(0, places.clamp_(max=len(values) - 1))

    def mine(self, places: Int[Tensor, " chosen"]) -> Int[Tensor, " mine"]:
        """Which of some places in the pack are this rank's."""
        return (places % self.size == self.rank).nonzero()[:, 0]

    def of_mine(self, places: Int[Tensor, " mine"]) -> Int[Tensor, " mine"]:
        """Places in the pack, all of this rank, as places in `own`."""
        return places // self.size

    def told(self, values: Tensor, mine: Int[Tensor, " mine"], count: int) -> Tensor:
        """[count, ...] of all ranks, the same on each, of [mine, ...]. The gradient is that of a loss that every rank
        has: of all their losses together."""
        whole = values.new_zeros(count, *values.shape[1:]).index_copy(0, mine, values)
        return _Told.apply(whole, self.group)  # pyright: ignore[reportReturnType]

    def apart(self, packing: Packing) -> Packing:
        """`packing` of tokens that lie by the rank that has them, as `to_heads` leaves them; experts of `own` alone."""
        rows, padded = self._by_rank(packing.rows), self._by_rank(packing.padded)
        routing = None if packing.routing is None else self.own(packing.routing)
        return replace(packing, rows=rows, padded=padded, routing=routing, sequence=self)

    def _by_rank(self, gather: Gather) -> Gather:
        each = -(-len(gather.owner) // self.size)
        place = torch.arange(each * self.size, device=gather.owner.device)
        token = (place % each * self.size + place // each).clamp_(max=len(gather.owner) - 1)
        index = gather.index % self.size * each + gather.index // self.size
        return Gather(index=index, owner=gather.owner.index_select(0, token))

    def to_heads(self, *tensors: Float[Tensor, "1 heads mine width"]) -> list[Tensor]:
        """[1, heads / ranks, tokens, width] of each: all tokens of some heads, for some tokens of all heads.

        Where there are fewer heads (of keys and values) than ranks, several ranks get the same.
        """
        parts = []
        for tensor in tensors:
            heads = tensor[0].repeat_interleave(max(1, self.size // tensor.shape[1]), 0)
            parts.append(heads.unflatten(0, (self.size, -1)).transpose(1, 2).flatten(2))
        came = exchanged(torch.cat(parts, -1), self.group)
        split = came.flatten(0, 1).split([part.shape[-1] for part in parts], -1)
        return [
            part.unflatten(-1, (-1, tensor.shape[-1])).transpose(0, 1)[None]
            for part, tensor in zip(split, tensors, strict=True)
        ]

    def to_tokens(self, out: Float[Tensor, "tokens heads width"]) -> Float[Tensor, "mine all_heads width"]:
        """The way back."""
        sent = out.flatten(1).unflatten(0, (self.size, -1))
        came = exchanged(sent, self.group)
        return came.transpose(0, 1).flatten(1).unflatten(-1, (-1, out.shape[-1]))


class _Told(torch.autograd.Function):
    """The sum over the ranks, of which one alone has something other than 0 at each place."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.ranks = group.size()
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.ranks, None
