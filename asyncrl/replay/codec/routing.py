"""The experts of each token, where the engine records them (`learner.router_replay`): `routed_experts` of a
trajectory's extras. As with the likeliest tokens, asked of the same values by the worker, at the door of the replay and
by the learner: an expert that there is not would end a GPU's process."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np

from asyncrl.types import ROUTED_EXPERTS, Routers, Trajectory

ROUTERS = "routers"
"""What the learner announces when it needs them: `[layers, k, experts]`."""


def announced_routers(board: Mapping[str, Any]) -> Routers | None:
    """None where none are announced."""
    said = board.get(ROUTERS)
    if type(said) is not list or len(said) != 3 or not all(type(each) is int and each > 0 for each in said):
        return None
    return Routers(layers=said[0], chosen=said[1], experts=said[2])


def row_of_routers(routers: Routers | None) -> list[int]:
    """As it is announced."""
    return [] if routers is None else [routers.layers, routers.chosen, routers.experts]


def routed_tokens(trajectory: Trajectory) -> int:
    """Those before the last sampled one: what is sampled is sampled from them."""
    mask = trajectory.loss_mask
    return len(mask) - 1 - int(mask[::-1].argmax()) if mask.any() else 0


def routing_fault(trajectory: Trajectory, routers: Routers | None = None) -> str:
    """Empty when it brings the experts of all tokens that something was sampled from, no expert twice for one.

    Args:
        routers: of the model; None is not known.
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
            f"extras[{ROUTED_EXPERTS!r}] must be {dtypes}{expected}, of the tokens before the last sampled one; "
            f"{given.dtype}{list(given.shape)} came"
        )
    if not given.size:
        return ""
    if int(given.min()) < 0 or (routers is not None and int(given.max()) >= routers.experts):
        known = f" of {routers.experts}" if routers else ""
        return f"extras[{ROUTED_EXPERTS!r}] must be experts{known}; {given.min()} to {given.max()} came"
    # Each once, as a top-k has them: an output would count twice.
    if any(bool((one == other).any()) for one, other in combinations(np.moveaxis(given, -1, 0).copy(), 2)):
        return f"extras[{ROUTED_EXPERTS!r}] names an expert twice for a token"
    return ""
