"""Checks the support from which each token was sampled if sampling was truncated: `support_*` of a trajectory's extras.

Like the reference's log-probs (`reference.py`), it is checked by the worker, by the replay server on arrival, and by
the learner. A trajectory without support was sampled from the whole vocabulary.
"""

from __future__ import annotations

import numpy as np

from asyncrl.types import SUPPORT_BITS, SUPPORT_COUNTS, SUPPORT_IDS, GroupHeader, Trajectory

NAMES = (SUPPORT_COUNTS, SUPPORT_IDS, SUPPORT_BITS)


def brings_support(header: GroupHeader) -> list[bool]:
    """Return for each trajectory whether it brings a support."""
    return [any(extra.name in NAMES for extra in facts.extras) for facts in header.trajectories]


def support_fault(trajectory: Trajectory, vocabulary: int | None = None) -> str:
    """Return what is wrong; empty if every sampled token has a support that contains it.

    Args:
        vocabulary: all ids must be below it; None if unknown.
    """
    lacking = [name for name in NAMES if name not in trajectory.extras]
    if lacking:
        return f"extras has no {', '.join(lacking)}, in which the engine records what each token was drawn from"
    counts, ids, bits = (trajectory.extras[name] for name in NAMES)
    own = trajectory.token_ids[trajectory.loss_mask]
    if counts.dtype != np.int32 or counts.shape != own.shape:
        return f"extras[{SUPPORT_COUNTS!r}] must be int32[{len(own)}]; got {counts.dtype}{list(counts.shape)}"
    listed, wide = np.maximum(counts, 0).astype(np.int64), counts < 0
    if ids.dtype != np.int32 or ids.shape != (int(listed.sum()),):
        return f"extras[{SUPPORT_IDS!r}] must be int32[{listed.sum()}]; got {ids.dtype}{list(ids.shape)}"
    rows = int(wide.sum())
    if bits.dtype != np.uint8 or bits.ndim != 2 or len(bits) != rows:
        return f"extras[{SUPPORT_BITS!r}] must be uint8[{rows}, vocabulary / 8]; got {bits.dtype}{list(bits.shape)}"
    width = bits.shape[1] * 8 if vocabulary is None else -(-vocabulary // 8) * 8
    if rows and (bits.shape[1] * 8 != width or int(own[wide].max()) >= width):
        return f"extras[{SUPPORT_BITS!r}] must have {width // 8} bytes for each token; got {bits.shape[1]}"
    if len(ids) and (int(ids.min()) < 0 or (vocabulary is not None and int(ids.max()) >= vocabulary)):
        return f"extras[{SUPPORT_IDS!r}] must be ids of the vocabulary of {vocabulary}; got {ids.min()} to {ids.max()}"
    # A token outside its support has a probability of 0: its log-prob would make every sum infinite.
    hits = np.repeat(np.arange(len(own)), listed)[ids == np.repeat(own, listed)]
    inside = np.zeros(len(own), np.bool_)
    inside[hits] = True
    seen = own[wide]
    inside[wide] = (bits[np.arange(rows), seen >> 3] >> (seen & 7) & 1).astype(np.bool_)
    if not (inside | (counts == 0)).all():
        return "extras support_*: a sampled token is not among the tokens that it was drawn from according to them"
    return ""
