"""Where a learner begins: at its checkpoint, or at the initial weights; told to the replay before anything else."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.errors import CheckpointError, CheckpointMismatchError
from asyncrl.learner.checkpoints.checkpoint import Checkpoints
from asyncrl.learner.roles import Roles
from asyncrl.replay.audit.ledger_file import LEDGER_FILE
from asyncrl.replay.codec.reference import FROM_ROLLOUT, REFERENCE
from asyncrl.replay.codec.routing import ROUTERS, row_of_routers
from asyncrl.replay.core.balance import EARLY, UPDATES
from asyncrl.replay.protocol import LearnerReplay
from asyncrl.storage.checkpoints import CHECKPOINT_DIR, SUPERVISED, finished, position_of
from asyncrl.storage.lines import read_lines, row_of, tail
from asyncrl.telemetry.metrics.evaluations import is_evaluation
from asyncrl.telemetry.metrics.log import METRICS_FILE
from asyncrl.types import NO_VERSION

log = logging.getLogger(__name__)


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
    known_version: int = NO_VERSION,
    settings: str = "",
    branch: bool = False,
    updates: int = 1,
    early: int = 0,
    copies: Mapping[str, Any] | None = None,
    run: str = "",
) -> Start:
    """Load the checkpoint, if any, and tell the replay from where to serve again. Collective.

    The replay answers no other call of a learner that has not done this; no publisher could announce itself.

    Args:
        known_version: the largest that the run folder names: a replay whose journal is gone may not know it.
        settings: digest of those that this learner trains by.
        branch: the checkpoint was chosen by hand.
        updates: optimizer steps per batch, in each of which the ranks meet.
        early: groups that are trained on together before the batch is full.
        copies: digests of what every machine has its own copy of; workers with others are refused, or told of.
        run: what it is called through all its resumes.
    """
    step, version, skipped, snapshot = None, NO_VERSION, 0, None
    if resume_from is not None:
        state, snapshot = checkpoints.load(resume_from, roles)
        if snapshot.get("schema") == SUPERVISED:
            raise CheckpointMismatchError(
                f"{resume_from} was saved by asyncrl sft, which has no groups to go on with. To begin with its weights "
                f"start a new run with model.path={resume_from.parent.parent / 'hf'}"
            )
        step, version, skipped = state.step, state.policy_version, state.skipped_steps
    numbers = torch.zeros(2, dtype=torch.int64, device=device)
    if rank == 0:
        checkpoints.begin_branch()  # before the replay goes back: a death between must find no newer checkpoint than it
        restored = replay.restore(
            step=step, policy_version=version, snapshot=snapshot, settings=settings, branch=branch, run=run
        )
        # The replay refuses what does not fit: groups with other tokens would crash the embedding of every rank.
        vocabulary = roles.policy.hf.get_input_embeddings().num_embeddings
        reference = FROM_ROLLOUT if roles.reference_comes else ""
        board = {"vocabulary": vocabulary, REFERENCE: reference, UPDATES: updates, EARLY: early, **(copies or {})}
        replay.announce(board | {ROUTERS: row_of_routers(roles.policy.routers)})
        fresh = restored.next_version
        if fresh <= known_version:
            fresh = known_version + 2  # the next one may have been published, and nobody left to write it down
            log.warning(
                "the run folder names policy_version %d and the replay knows of none above %d, so its journal is gone: "
                "going on with %d, for a version is never used twice",
                *(known_version, restored.next_version - 1, fresh),
            )
        numbers = torch.tensor([restored.next_step, fresh], device=device)
    if dist.is_initialized():
        dist.broadcast(numbers, src=0)
    next_step, next_version = numbers.tolist()
    return Start(step=next_step, policy_version=next_version, parent=version, skipped_steps=skipped)


def highest_version(run_dir: Path) -> int:
    """The largest policy_version that anything in a run folder names; NO_VERSION where nothing does."""
    versions = [NO_VERSION]
    for name in (METRICS_FILE, LEDGER_FILE):
        rows = (row_of(line) for line in tail(run_dir / name))
        versions += [row["policy_version"] for row in rows if row and isinstance(row.get("policy_version"), int)]
    for path in finished(run_dir / CHECKPOINT_DIR):
        with contextlib.suppress(CheckpointError):  # damaged, and not the one to go on from
            versions.append(position_of(path)[1])
    return max(versions)


def kept_rows(run_dir: Path, start: Start) -> int:
    """The step up to which rows of before belong to what is gone on from: another line, of larger versions, may have
    trained its last steps again and was left since (`begin_branch`)."""
    rows = (row for row in read_lines(run_dir / METRICS_FILE).rows if not is_evaluation(row))
    of_others = [row["step"] - 1 for row in rows if row.get("policy_version", NO_VERSION) > start.parent]
    return min([start.step, *of_others])
