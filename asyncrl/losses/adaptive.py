"""The staleness-adaptive trust region (SAT, Yang et al., 2607.18722): a clip range that is narrower for outlying
ratios.

Let d be the log-ratio that is clipped, without gradient, and q the smallest |d| that a fraction `sat_quantile` of all
tokens does not exceed (the authors' 3.3). For a token with |d| > q, the side of the clip range on which it lies is
multiplied by

    1 / (1 + (d / q)^2)    (3.2, 3.4)

which is below 1/2; the other side, and both sides for all other tokens, are unchanged. The loss is the clip with that
range (3.5, 3.6): updates that would move an outlying token further out stop earlier, those that bring it back are
unaffected.

Choices where the authors differ or say nothing: they take q over the tokens of a micro-batch; here it is taken over the
whole optimizer batch, so that the result does not depend on how a batch is split. On the edge U, d is the log-ratio
clipped there.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def tail_from(distances: Float[Tensor, " N"], share: float) -> float:
    """The smallest of `distances` (|d|, at least 0) that a fraction `share` of them does not exceed; 0 of none."""
    if not distances.numel():
        return 0.0
    # A fraction of 0.9 of 10 is 9 of them, even if 0.9 * 10 is rounded up slightly.
    rank = int(torch.tensor(share * distances.numel() * (1 - 1e-12), dtype=torch.float64).ceil())
    return float(distances.kthvalue(max(rank, 1)).values)


def contraction(log_ratio: Float[Tensor, " T"], tail: float) -> Float[Tensor, " T"]:
    """Factor of the range on the side of each token: 1 up to `tail`, or everywhere if `tail` is 0."""
    if tail <= 0:
        return torch.ones_like(log_ratio)
    narrow = 1 / (1 + (log_ratio / tail).square())
    return torch.where(log_ratio.abs() > tail, narrow, torch.ones_like(narrow))
