"""Checks the likeliest tokens at each position if the engine records them (`engine.record_topk`): `topk_*` of a
trajectory's extras. Like supports, they are checked by the worker, by the replay server on arrival, and by the learner.
"""

from __future__ import annotations

import numpy as np

from asyncrl.types import MAX_LOGPROB, TOPK_IDS, TOPK_LOGPROBS, GroupHeader, Trajectory

NAMES = (TOPK_IDS, TOPK_LOGPROBS)
MOST = 1.01
"""Limit on the total probability of the tokens at one position; above 1 for rounding."""


def brings_topk(header: GroupHeader) -> list[bool]:
    """Return for each trajectory whether it brings likeliest tokens."""
    return [any(extra.name in NAMES for extra in facts.extras) for facts in header.trajectories]


def topk_fault(trajectory: Trajectory, width: int = 0, vocabulary: int | None = None) -> str:
    """Return what is wrong; empty if the trajectory brings the likeliest tokens for each sampled one, with log-probs of
    one distribution.

    Args:
        width: required number per sampled token; 0 is any number.
        vocabulary: all ids must be below it; None if unknown.
    """
    ids, logprobs = trajectory.extras.get(TOPK_IDS), trajectory.extras.get(TOPK_LOGPROBS)
    if ids is None or logprobs is None:
        return f"extras has no {TOPK_IDS!r} and {TOPK_LOGPROBS!r}, the likeliest tokens"
    count = int(trajectory.loss_mask.sum())
    shape = (count, width or (ids.shape[1] if ids.ndim == 2 else 1))
    if (ids.dtype, logprobs.dtype) != (np.int32, np.float32) or ids.shape != shape or logprobs.shape != shape:
        return (
            f"extras[{TOPK_IDS!r}] must be int32 and extras[{TOPK_LOGPROBS!r}] float32, both {list(shape)}; got "
            f"{ids.dtype}{list(ids.shape)} and {logprobs.dtype}{list(logprobs.shape)}"
        )
    # The learner indexes its own log-probs by these ids: one out of range would crash it.
    if ids.size and (int(ids.min()) < 0 or (vocabulary is not None and int(ids.max()) >= vocabulary)):
        return f"extras[{TOPK_IDS!r}] must be ids of the model's vocabulary; got {ids.min()} to {ids.max()}"
    # -inf is a token that cannot be sampled. The comparisons are written so that a NaN is refused.
    mass = np.exp(np.minimum(logprobs, 1.0), dtype=np.float64).sum(-1)
    if logprobs.size and not (logprobs.max() <= MAX_LOGPROB and mass.max() <= MOST):
        return f"extras[{TOPK_LOGPROBS!r}] must be log-probs of one distribution for each token"
    return ""
