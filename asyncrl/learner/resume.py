"""Where a learner begins: at its checkpoint, or at the initial weights; told to the replay before anything else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.roles import Roles
from asyncrl.replay.base import LearnerReplay
from asyncrl.replay.reference import FROM_ROLLOUT, REFERENCE
from asyncrl.types import NO_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Equal on all ranks."""

    step: int
    """First step to train, from 0: as many were trained before."""
    policy_version: int
    """Number under which the weights in hand are to be published."""
    parent: int
    """Version these same weights had before; NO_VERSION for initial weights."""
    skipped_steps: int = 0


def begin(
    replay: LearnerReplay,
    checkpoints: Checkpoints,
    roles: Roles,
    resume_from: Path | None,
    *,
    rank: int,
    device: torch.device,
) -> Start:
    """Load the checkpoint, if any, and tell the replay from where to serve again. Collective.

    The replay answers no other call of a learner that has not done this; no publisher could announce itself.
    """
    step, version, skipped, snapshot = None, NO_VERSION, 0, None
    if resume_from is not None:
        state, snapshot = checkpoints.load(resume_from, roles)
        step, version, skipped = state.step, state.policy_version, state.skipped_steps
    numbers = torch.zeros(2, dtype=torch.int64, device=device)
    if rank == 0:
        restored = replay.restore(step=step, policy_version=version, snapshot=snapshot)
        # The replay refuses what does not fit: groups with other tokens would crash the embedding of every rank.
        vocabulary = roles.policy.hf.get_input_embeddings().num_embeddings
        replay.announce({"vocabulary": vocabulary, REFERENCE: FROM_ROLLOUT if roles.reference_comes else ""})
        numbers = torch.tensor([restored.next_step, restored.next_version], device=device)
    if dist.is_initialized():
        dist.broadcast(numbers, src=0)
    next_step, next_version = numbers.tolist()
    return Start(step=next_step, policy_version=next_version, parent=version, skipped_steps=skipped)
