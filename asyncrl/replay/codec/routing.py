"""Checks the experts of each token if the engine records them (`learner.router_replay`): `routed_experts` of a
trajectory's extras. Like the likeliest tokens, they are checked by the worker, by the replay server on arrival, and by
the learner: an expert that does not exist would crash a GPU's process."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np

from asyncrl.types import ROUTED_EXPERTS, Routers, Trajectory

ROUTERS = "routers"
"""Key of what the learner announces if it needs them: `[layers, k, experts]`."""


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
