"""Checks what was recorded of each token, in a trajectory's extras: the log-probs of a reference
(`reference.path=rollout`), the support from which each token was drawn if sampling was truncated, the likeliest tokens
(`engine.record_topk`), and the experts that routers chose (`learner.router_replay`).

The same values are checked three times: by the worker, while the group can still be generated again; by the replay
server on arrival, since an accepted group is part of a step, and of that step again after every resume; and by the
learner. A trajectory without support was sampled from the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np

from asyncrl.errors import WireError
from asyncrl.types import (
    MAX_LOGPROB,
    REF_LOGPROBS,
    ROUTED_EXPERTS,
    SUPPORT_BITS,
    SUPPORT_COUNTS,
    SUPPORT_IDS,
    TOPK_IDS,
    TOPK_LOGPROBS,
    GroupHeader,
    Routers,
    Trajectory,
)

REFERENCE, FROM_ROLLOUT = "reference", "rollout"
"""Key and value that the learner announces if it needs the log-probs of a reference."""
ROUTERS = "routers"
"""Key of what the learner announces if it needs the experts of each token: `[layers, k, experts]`."""
SUPPORT = (SUPPORT_COUNTS, SUPPORT_IDS, SUPPORT_BITS)
TOPK = (TOPK_IDS, TOPK_LOGPROBS)
MOST_MASS = 1.01
"""Limit on the total probability of the likeliest tokens at one position; above 1 for rounding."""


def recorded_fault(trajectory: Trajectory, vocabulary: int, routers: Routers | None) -> str:
    """Return what is wrong with what the trajectory brings; empty if nothing is. The experts must be there if there are
    `routers`, and are not looked at otherwise."""
    given = trajectory.extras.keys()
    fault = reference_fault(trajectory) if REF_LOGPROBS in given else ""
    fault = fault or (support_fault(trajectory, vocabulary) if not given.isdisjoint(SUPPORT) else "")
    fault = fault or (topk_fault(trajectory, vocabulary=vocabulary) if not given.isdisjoint(TOPK) else "")
    return fault or (routing_fault(trajectory, routers) if routers is not None else "")


def is_checked(header: GroupHeader) -> bool:
    """Whether a trajectory brings something that `recorded_fault` checks without routers."""
    names = {extra.name for facts in header.trajectories for extra in facts.extras}
    return not names.isdisjoint((REF_LOGPROBS, *SUPPORT, *TOPK))


def reference_fault(trajectory: Trajectory) -> str:
    """Return what is wrong; empty if the trajectory brings the reference's log-probs of its sampled tokens.

    Those of other tokens may have any value, including NaN. A sampled token without one would count as a KL of 0 in the
    loss, and make every sum of the KL in the reward non-finite.
    """
    given = trajectory.extras.get(REF_LOGPROBS)
    length = len(trajectory.token_ids)
    if given is None:
        return f"extras has no {REF_LOGPROBS!r}, the log-probs of the reference"
    if given.dtype != np.float32 or given.shape != (length,):
        return f"extras[{REF_LOGPROBS!r}] must be float32[{length}]; got {given.dtype}{list(given.shape)}"
    read = given[trajectory.loss_mask]
    if not np.isfinite(read).all() or (read > MAX_LOGPROB).any():
        return f"extras[{REF_LOGPROBS!r}] must be finite and not above 0 at every sampled token"
    return ""


def require_reference(header: GroupHeader) -> None:
    """Raises WireError if a trajectory does not bring reference log-probs."""
    lacking = sum(all(extra.name != REF_LOGPROBS for extra in facts.extras) for facts in header.trajectories)
    if lacking:
        raise WireError(
            f"{lacking} trajectories of group {header.group_id} arrived without extras[{REF_LOGPROBS!r}], which "
            "the learner needs (reference.path=rollout). Start the workers with the learner's settings"
        )


def support_fault(trajectory: Trajectory, vocabulary: int | None = None) -> str:
    """Return what is wrong; empty if every sampled token has a support that contains it.

    Args:
        vocabulary: all ids must be below it; None if unknown.
    """
    lacking = [name for name in SUPPORT if name not in trajectory.extras]
    if lacking:
        return f"extras has no {', '.join(lacking)}, in which the engine records what each token was drawn from"
    counts, ids, bits = (trajectory.extras[name] for name in SUPPORT)
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
    if logprobs.size and not (logprobs.max() <= MAX_LOGPROB and mass.max() <= MOST_MASS):
        return f"extras[{TOPK_LOGPROBS!r}] must be log-probs of one distribution for each token"
    return ""


def announced_routers(board: Mapping[str, Any]) -> Routers | None:
    """Return the announced routers; None if there are none."""
    said = board.get(ROUTERS)
    if type(said) is not list or len(said) != 3 or not all(type(each) is int and each > 0 for each in said):
        return None
    return Routers(layers=said[0], chosen=said[1], experts=said[2])


def row_of_routers(routers: Routers | None) -> list[int]:
    """Return the row by which routers are announced; empty if there are none."""
    return [] if routers is None else [routers.layers, routers.chosen, routers.experts]


def routed_tokens(trajectory: Trajectory) -> int:
    """Return the number of tokens before the last sampled one: sampling is from their outputs."""
    mask = trajectory.loss_mask
    return len(mask) - 1 - int(mask[::-1].argmax()) if mask.any() else 0


def routing_fault(trajectory: Trajectory, routers: Routers | None = None) -> str:
    """Return what is wrong; empty if the trajectory brings the experts of all tokens before the last sampled one, and
    no token has the same expert twice.

    Args:
        routers: the routers of the model; None if unknown.
    """
    tokens, given = routed_tokens(trajectory), trajectory.extras.get(ROUTED_EXPERTS)
    if not tokens:
        return ""
    if given is None:
        return f"extras has no {ROUTED_EXPERTS!r}, the experts of each token"
    wanted = (np.uint8, np.int16) if routers is None else (routers.dtype,)
    shape = (tokens, *(given.shape[1:] if routers is None else (routers.layers, routers.chosen)))
    if given.dtype not in wanted or given.ndim != 3 or given.shape != shape:
        dtypes = " or ".join(np.dtype(each).name for each in wanted)
        expected = f"[{tokens}, layers, k]" if routers is None else str(list(shape))
        return (
            f"extras[{ROUTED_EXPERTS!r}] must be {dtypes}{expected}, of the tokens before the last sampled one; got "
            f"{given.dtype}{list(given.shape)}"
        )
    if not given.size:
        return ""
    if int(given.min()) < 0 or (routers is not None and int(given.max()) >= routers.experts):
        known = f" of {routers.experts}" if routers else ""
        return f"extras[{ROUTED_EXPERTS!r}] must be experts{known}; got {given.min()} to {given.max()}"
    # A top-k has each expert once: a duplicate would count its output twice.
    if any(bool((one == other).any()) for one, other in combinations(np.moveaxis(given, -1, 0).copy(), 2)):
        return f"extras[{ROUTED_EXPERTS!r}] names an expert twice for a token"
    return ""
