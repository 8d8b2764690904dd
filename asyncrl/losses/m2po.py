"""The second-moment trust regions of M2PO: which tokens to drop, or where to clip, so that mean (log r)^2 is bounded.

Both depend on all tokens of a batch, and are determined in a first pass over it (`asyncrl.losses.kept`).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def m2po_limit(squares: Float[Tensor, " N"], bound: float, strict: bool = False) -> float:
    """Largest of these (log r)^2, in any order, that is kept: the largest are dropped one by one until the rest average
    <= bound. Infinite if all are kept, -1 if none.

    With `strict`, AReaL's rule: until they average < bound, but never the last one.
    """
    ascending = squares.double().sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=squares.device)
    kept = max(int((means < bound).sum()), 1) if strict else int((means <= bound).sum())
    if kept >= len(ascending):
        return math.inf
    return float(ascending[kept - 1]) if kept else -1.0


def m2po_clip_range(log_ratio: Float[Tensor, " N"], bound: float) -> tuple[float, float]:
    """(low, high) ratio bounds e^-t, e^t: t is the largest of these |log r|, those of outward tokens, with which the
    capped values average < bound.

    As in the released code: t is one of the data's own values and not the exact root, minus 1e-12 in its square, and
    its exponential is rounded to float32. This rounding decides on which side of the bound that token itself falls. (0,
    inf) if they already average <= bound.
    """
    squares = log_ratio.square().sort().values
    count = squares.numel()
    if count == 0 or float(squares.sum()) / count <= bound + 1e-12:
        return 0.0, math.inf
    rest = torch.arange(count - 1, -1, -1, device=squares.device)
    capped_sum = squares.cumsum(0).double() + (squares.double() - 1e-12) * rest
    first = int((capped_sum < bound * count - 1e-12).sum())
    width = math.sqrt(max(float(squares[first - 1]) - 1e-12, 0.0)) if first else 0.0
    low, high = torch.tensor([-width, width], dtype=torch.float32).exp().tolist()
    return 1 - (1 - low), 1 + (high - 1)
