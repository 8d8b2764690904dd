"""The staleness-adaptive trust region (SAT, Yang et al., 2607.18722): a clip range that is narrower for far ratios.

With d the log-ratio that is clipped, without gradient, and q the smallest |d| that a share `sat_quantile` of all tokens
does not exceed (the authors' 3.3), the side of the range that a token with |d| > q is on is multiplied by

    1 / (1 + (d / q)^2)    (3.2, 3.4)

which is below 1/2; the other side, and both sides of the other tokens, stay. The loss is the clip with that range (3.5,
3.6): updates that would move a token of the tail further out stop earlier, those that bring it back are untouched.

Chosen where the authors do otherwise or say nothing: they take q over the tokens of a micro-batch, here it is that of
the whole optimizer batch, so that how a batch is split changes nothing. On the edge U, d is what is clipped there.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def tail_from(distances: Float[Tensor, " N"], share: float) -> float:
    """The smallest of `distances` (|d|, at least 0) that `share` of them do not exceed; 0 of none."""
    if not distances.numel():
        return 0.0
    # A share of 0.9 of 10 is 9 of them, also where 0.9 * 10 is rounded up a little.
    rank = int(torch.tensor(share * distances.numel() * (1 - 1e-12), dtype=torch.float64).ceil())
    return float(distances.kthvalue(max(rank, 1)).values)


def contraction(log_ratio: Float[Tensor, " T"], tail: float) -> Float[Tensor, " T"]:
    """What the range is multiplied by on the side of each token: 1 up to `tail`, or where that is 0."""
    if tail <= 0:
        return torch.ones_like(log_ratio)
    narrow = 1 / (1 + (log_ratio / tail).square())
    return torch.where(log_ratio.abs() > tail, narrow, torch.ones_like(narrow))
