"""Sequence parallelism: neighbouring ranks compute a pack together, each with part of its tokens (DeepSpeed-Ulysses,
arXiv 2309.14509).

    rank 0: tokens 0 2 4 .    --- all to all -->   all tokens, heads 0 1    --- all to all -->   tokens 0 2 4 .
    rank 1: tokens 1 3 5 .      q, k, v of         all tokens, heads 2 3      output of          tokens 1 3 5 .
            every head          its tokens                                    attention

Weights are not affected: FSDP2 shards them over these ranks as over the others, and sums the gradients of each rank's
own tokens. Results computed from the last layer's states (log-probs, values) are gathered on all ranks of the group, so
that each computes the same loss, of the whole micro-batch. Tokens are dealt out in turn, because the head computes only
completions: with contiguous parts the rank that has the end would do all of its work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from asyncrl.learner.batch.packing import Blocks, Gather, Packing, Shared
from asyncrl.learner.parallel.collectives import exchanged, sequence_group, summed_over, through


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRanks:
    """The ranks that share each pack, from the point of view of one of them."""

    group: dist.ProcessGroup
    rank: int
    """Rank within the group."""
    size: int

    @classmethod
    def here(cls) -> SequenceRanks | None:
        """This process's group; None if every rank has packs of its own."""
        group = sequence_group()
        return None if group is None else cls(group=group, rank=group.rank(), size=group.size())

    def own(self, values: Tensor) -> Tensor:
        """This rank's part of [tokens, ...]. It has the same size on every rank, padded by repeating the last token."""
        each = -(-len(values) // self.size)
        places = torch.arange(each, device=values.device) * self.size + self.rank
        return values.index_select(0, places.clamp_(max=len(values) - 1))

    def mine(self, places: Int[Tensor, " chosen"]) -> Int[Tensor, " mine"]:
        """Which of the given indices into the pack are this rank's."""
        return (places % self.size == self.rank).nonzero()[:, 0]

    def of_mine(self, places: Int[Tensor, " mine"]) -> Int[Tensor, " mine"]:
        """Convert indices into the pack, all of them this rank's, to indices into `own`."""
        return places // self.size

    def told(self, values: Tensor, mine: Int[Tensor, " mine"], count: int) -> Tensor:
        """Gather [mine, ...] of all ranks into [count, ...], the same on each. Every rank computes the same loss from
        it; the gradient is that of the sum of these losses."""
        # At each index only one rank has a value other than 0.
        whole = values.new_zeros(count, *values.shape[1:]).index_copy(0, mine, values)
        return through(whole, lambda x: summed_over(x, self.group), lambda grad: grad * self.size)

    def apart(self, packing: Packing) -> Packing:
        """`packing` for tokens ordered by rank, as `to_heads` leaves them, with the recorded experts of `own` only."""
        total, device = len(packing.rows.owner), packing.rows.owner.device
        each = -(-total // self.size)
        place = torch.arange(each * self.size, device=device)
        token = (place % each * self.size + place // each).clamp_(max=total - 1)

        def moved(index: Tensor) -> Tensor:
            return index % self.size * each + index // self.size

        def by_rank(gather: Gather) -> Gather:
            return Gather(index=moved(gather.index), owner=gather.owner.index_select(0, token))

        def in_blocks(blocks: Blocks) -> Blocks:
            return replace(blocks, rows=by_rank(blocks.rows))

        def by_prompt(shared: Shared) -> Shared:
            queries, keys = moved(shared.queries), moved(shared.keys)
            return replace(shared, segments=in_blocks(shared.segments), queries=queries, keys=keys)

        return replace(
            packing,
            rows=by_rank(packing.rows),
            padded=in_blocks(packing.padded),
            shared=None if packing.shared is None else by_prompt(packing.shared),
            routing=None if packing.routing is None else self.own(packing.routing),
            sequence=self,
        )

    def to_heads(self, *tensors: Float[Tensor, "1 heads mine width"]) -> list[Tensor]:
        """[1, heads / ranks, tokens, width] of each tensor: all tokens of some heads, from some tokens of all heads.

        With fewer heads (of keys and values) than ranks, several ranks get the same ones.
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
        """Inverse of `to_heads`, for the output of attention."""
        sent = out.flatten(1).unflatten(0, (self.size, -1))
        came = exchanged(sent, self.group)
        return came.transpose(0, 1).flatten(1).unflatten(-1, (-1, out.shape[-1]))
