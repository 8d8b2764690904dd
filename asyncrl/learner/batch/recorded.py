"""Reads what came with the tokens of a micro-batch's trajectories: the log-probs of the reference, and from the engine
the most likely tokens (`engine.record_topk`) and the experts that its routers chose (`learner.router_replay`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import EpisodeError
from asyncrl.learner.batch.plan import Member
from asyncrl.recorded import reference_fault, routing_fault, topk_fault
from asyncrl.types import REF_LOGPROBS, ROUTED_EXPERTS, TOPK_IDS, TOPK_LOGPROBS, Routers, StepPlan, Trajectory

OWN_CHOICE = -1
"""For all experts of a token that nothing was sampled from: the engine's choice is not recorded."""


def _refuse(plan: StepPlan, member: Member, fault: str, way_out: str) -> None:
    """Raises EpisodeError if there is a fault in what came with a trajectory."""
    if fault:
        group = plan.groups[member[0]]
        raise EpisodeError(
            f"step {plan.step}: trajectory {member[1]} of group {group.group_id}, made by {group.worker}: {fault}. "
            f"{way_out}"
        )


def reference_of(plan: StepPlan, members: Sequence[Member], chosen: Sequence[Trajectory]) -> list[NDArray[np.float32]]:
    """[T] log-probs of the reference for each trajectory, as its environment attached them.

    Raises:
        EpisodeError: it attached none, or invalid ones.
    """
    if not members:
        return [np.zeros(len(trajectory.token_ids), np.float32) for trajectory in chosen]
    way_out = (
        "reference.path=rollout needs them. Start the workers with the learner's settings (for a rerun, take a run of "
        "such workers), or set reference.path=MODEL"
    )
    for member, trajectory in zip(members, chosen, strict=True):
        _refuse(plan, member, reference_fault(trajectory), way_out)
    return [trajectory.extras[REF_LOGPROBS] for trajectory in chosen]


def topk_of(
    plan: StepPlan, members: Sequence[Member], chosen: Sequence[Trajectory]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """[sampled tokens, k] ids and log-probs of all trajectories, concatenated.

    Raises:
        EpisodeError: a trajectory has none, or another k.
    """
    if not members:
        return np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32)
    way_out = (
        "loss.centering needs them. Start the workers with engine.record_topk (for a rerun, take a run that had it); "
        "an environment that makes trajectories by itself must attach Completion.recorded"
    )
    width = 0
    for member, trajectory in zip(members, chosen, strict=True):
        _refuse(plan, member, topk_fault(trajectory, width), way_out)
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
    way_out = (
        "learner.router_replay=true needs them. Start the workers with the same settings; for a rerun or resume with "
        "groups made without them, set learner.router_replay=false"
    )
    found = []
    for place, trajectory in enumerate(chosen):
        routed = np.full((len(trajectory.token_ids), routers.layers, routers.chosen), OWN_CHOICE, np.int16)
        if fault := routing_fault(trajectory, routers):
            _refuse(plan, members[place], fault, way_out)
        given = trajectory.extras.get(ROUTED_EXPERTS)
        if given is not None:
            routed[: len(given)] = given
        found.append(routed)
    return found
