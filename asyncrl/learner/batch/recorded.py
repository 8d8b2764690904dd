"""Reads what the engine recorded with the tokens from the trajectories of a micro-batch: the most likely tokens
(`engine.record_topk`), and the experts that its routers chose (`learner.router_replay`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import EpisodeError
from asyncrl.learner.batch.plan import Member
from asyncrl.replay.codec.recorded import routing_fault, topk_fault
from asyncrl.types import ROUTED_EXPERTS, TOPK_IDS, TOPK_LOGPROBS, Routers, StepPlan, Trajectory

OWN_CHOICE = -1
"""For all experts of a token that nothing was sampled from: the engine's choice is not recorded."""


def topk_of(
    plan: StepPlan, members: Sequence[Member], chosen: Sequence[Trajectory]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """[sampled tokens, k] ids and log-probs of all trajectories, concatenated.

    Raises:
        EpisodeError: a trajectory has none, or another k.
    """
    if not members:
        return np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32)
    width = 0
    for (g, t), trajectory in zip(members, chosen, strict=True):
        fault = topk_fault(trajectory, width)
        if fault:
            group = plan.groups[g]
            raise EpisodeError(
                f"step {plan.step}: trajectory {t} of group {group.group_id}, made by {group.worker}: {fault}. "
                "loss.centering needs them. Start the workers with engine.record_topk (for a rerun, take a run that "
                "had it); an environment that makes trajectories by itself must attach Completion.recorded"
            )
        width = trajectory.extras[TOPK_IDS].shape[1]
    ids, logprobs = ([trajectory.extras[name] for trajectory in chosen] for name in (TOPK_IDS, TOPK_LOGPROBS))
    return np.concatenate(ids), np.concatenate(logprobs)


def routing_of(
    plan: StepPlan, members: Sequence[Member], chosen: Sequence[Trajectory], routers: Routers
) -> list[NDArray[np.int16]]:
    """[T, layers, k] recorded experts of each trajectory.

    Raises:
        EpisodeError: a trajectory has none, or some that no router of the model can have chosen.
    """
    found = []
    for place, trajectory in enumerate(chosen):
        routed = np.full((len(trajectory.token_ids), routers.layers, routers.chosen), OWN_CHOICE, np.int16)
        fault = routing_fault(trajectory, routers)
        if fault:
            g, t = members[place]
            group = plan.groups[g]
            raise EpisodeError(
                f"step {plan.step}: trajectory {t} of group {group.group_id}, made by {group.worker}: {fault}. "
                "learner.router_replay=true needs them. Start the workers with the same settings; for a rerun or "
                "resume with groups made without them, set learner.router_replay=false"
            )
        given = trajectory.extras.get(ROUTED_EXPERTS)
        if given is not None:
            routed[: len(given)] = given
        found.append(routed)
    return found
