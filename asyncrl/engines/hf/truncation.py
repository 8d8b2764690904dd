"""Top-k, top-p and min-p: which tokens a row may sample, and how that support is recorded for the learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.types import SUPPORT_BITS, SUPPORT_COUNTS, SUPPORT_IDS

ID_BYTES = 4
CANDIDATES = 1024
"""Tokens that are ranked first; a support with more of them needs a sort of the whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Truncation parameters, [R] each; 1, 0 and 0 leave a row unchanged."""

    top_p: Float[Tensor, " R"]
    top_k: Float[Tensor, " R"]
    min_p: Float[Tensor, " R"]

    def of(self, rows: Int[Tensor, " rows"]) -> Truncation:
        return Truncation(top_p=self.top_p[rows], top_k=self.top_k[rows], min_p=self.min_p[rows])


def supports(logits: Float[Tensor, "R V"], given: Truncation) -> Bool[Tensor, "R V"]:
    """Return the support: min-p over the whole vocabulary; of the rest the k most likely; of those the fewest that
    together have top_p of their total (order and renormalisation are those of vLLM). Never empty.

    Args:
        logits: after the temperature.
    """
    # float64: with a vocabulary of 10^5 the error of a float32 sum exceeds the probability of a rare token.
    normaliser = logits.double().logsumexp(-1)
    if logits.shape[-1] <= CANDIDATES:
        return _by_rank(logits, normaliser, given, *logits.sort(dim=-1, descending=True, stable=True))[0]
    # Sorting a large vocabulary takes longer than a small model's step; the most likely tokens nearly always suffice.
    order = logits.topk(CANDIDATES, sorted=False).indices.sort(-1).values
    ranked, place = logits.gather(1, order).sort(dim=-1, descending=True, stable=True)
    inside, sure = _by_rank(logits, normaliser, given, ranked, order.gather(1, place))
    undecided = (~sure).nonzero()[:, 0]
    if len(undecided):
        rows = logits[undecided]
        sorted_whole = rows.sort(dim=-1, descending=True, stable=True)
        inside[undecided] = _by_rank(rows, normaliser[undecided], given.of(undecided), *sorted_whole)[0]
    return inside


def _by_rank(
    logits: Float[Tensor, "R V"],
    normaliser: Float[Tensor, " R"],
    given: Truncation,
    ranked: Float[Tensor, "R C"],
    order: Int[Tensor, "R C"],
) -> tuple[Bool[Tensor, "R V"], Bool[Tensor, " R"]]:
    """Return the support computed from the C most likely tokens of each row, in their order, and whether it would be
    the same with more of them."""
    probs = (ranked.double() - normaliser[:, None]).exp()
    kept = probs >= given.min_p.double()[:, None] * probs[:, :1]
    place = torch.arange(ranked.shape[-1], device=logits.device)
    kept &= (place < given.top_k[:, None]) | (given.top_k <= 0)[:, None]
    narrowed, uncut = torch.where(kept, probs, 0.0), kept.all(-1)
    # The total that top-p refers to: without the other two it is the whole vocabulary, ranked or not.
    whole = torch.where(uncut, 1.0, narrowed.sum(-1))
    before = narrowed.cumsum(-1) - narrowed
    # With top_p of 1, rounding would otherwise drop the last tokens.
    kept &= (before < (given.top_p.double() * whole)[:, None]) | (given.top_p >= 1)[:, None]
    kept[:, 0] = True
    # A tie with the last of the C may extend beyond it, and so may what min-p and top-k leave.
    last = ranked.gather(1, kept.sum(-1, keepdim=True) - 1)[:, 0]
    sure = (last > ranked[:, -1]) & ~(uncut & ((given.min_p > 0) | (given.top_k > 0)))
    return torch.zeros(logits.shape, dtype=torch.bool, device=logits.device).scatter_(1, order, kept), sure


def written(support: Bool[Tensor, "R V"]) -> dict[str, Sequence[NDArray[Any]]]:
    """Return each row's piece of `support_counts`, `support_ids` and `support_bits` (see `asyncrl.types`)."""
    vocabulary = support.shape[-1]
    width = -(-vocabulary // 8)
    sizes = support.sum(-1, dtype=torch.int32)
    wide = (sizes * ID_BYTES > width) & (sizes < vocabulary)
    listed = sizes * ID_BYTES <= width
    counts = torch.where(wide, -sizes, torch.where(listed, sizes, 0)).cpu().numpy()
    ids = (support & listed[:, None]).nonzero()[:, 1].to(torch.int32).cpu().numpy()
    bits = _packed(support[wide], width).cpu().numpy()
    pieces: dict[str, list[NDArray[Any]]] = {SUPPORT_COUNTS: [], SUPPORT_IDS: [], SUPPORT_BITS: []}
    at = row = 0
    for place, count in enumerate(counts.tolist()):
        listed_here, wide_here = max(count, 0), int(count < 0)
        pieces[SUPPORT_COUNTS].append(counts[place : place + 1])
        pieces[SUPPORT_IDS].append(ids[at : at + listed_here])
        pieces[SUPPORT_BITS].append(bits[row : row + wide_here])
        at, row = at + listed_here, row + wide_here
    return {name: tuple(each) for name, each in pieces.items()}


def _packed(rows: Bool[Tensor, "R V"], width: int) -> Tensor:
    """uint8 [R, width], the first of eight in the lowest bit."""
    padded = torch.nn.functional.pad(rows.to(torch.uint8), (0, 8 * width - rows.shape[-1]))
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=rows.device)
    return (padded.view(len(rows), width, 8) * weights).sum(-1, dtype=torch.uint8)
