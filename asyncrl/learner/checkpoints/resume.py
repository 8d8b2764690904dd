"""Determines where a learner starts, from its checkpoint or from initial weights, and tells the replay server first."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.balance import UPDATES
from asyncrl.errors import CheckpointError, CheckpointMismatchError
from asyncrl.learner.checkpoints.checkpoint import Checkpoints
from asyncrl.learner.roles import Roles
from asyncrl.recorded import FROM_ROLLOUT, REFERENCE, ROUTERS, row_of_routers
from asyncrl.replay.audit.ledger_file import LEDGER_FILE
from asyncrl.replay.protocol import LearnerReplay
from asyncrl.storage.checkpoints import CHECKPOINT_DIR, SUPERVISED, finished, position_of
from asyncrl.storage.lines import read_lines, row_of, tail
from asyncrl.telemetry.metrics.evaluations import is_evaluation
from asyncrl.telemetry.metrics.log import METRICS_FILE
from asyncrl.types import NO_VERSION

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start of training; equal on all ranks."""

    step: int = 0
    """First step to train, from 0; equal to the number of steps trained before."""
    policy_version: int = 0
    """Version under which the loaded weights will be published."""
    parent: int = NO_VERSION
    """Version that these weights had before; NO_VERSION for initial weights."""
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
    copies: Mapping[str, Any] | None = None,
    run: str = "",
) -> Start:
    """Load the checkpoint, if any, and tell the replay server from where to serve again. Collective.

    The replay server answers no other call of a learner before this one; no publisher could announce itself.

    Args:
        known_version: the largest version named in the run folder: a replay server whose journal is gone may not
            know it.
        settings: digest of the settings that this learner trains with.
        branch: the checkpoint was chosen by path.
        updates: optimizer steps per batch; in each of them gradients are reduced over the ranks.
        copies: digests of what every machine has a copy of; workers with different ones are refused, or reported.
        run: name of the run, the same through all its resumes.
    """
    step, version, skipped, snapshot = None, NO_VERSION, 0, None
    if resume_from is not None:
        state, snapshot = checkpoints.load(resume_from, roles)
        if snapshot.get("schema") == SUPERVISED:
            raise CheckpointMismatchError(
                f"{resume_from} was saved by asyncrl sft, which has no groups to continue with. To begin with its "
                f"weights, start a new run with model.path={resume_from.parent.parent / 'hf'}"
            )
        step, version, skipped = state.step, state.policy_version, state.skipped_steps
    numbers = torch.zeros(2, dtype=torch.int64, device=device)
    if rank == 0:
        checkpoints.begin_branch()  # before the replay server goes back: a crash in between must leave no newer one
        restored = replay.restore(
            step=step, policy_version=version, snapshot=snapshot, settings=settings, branch=branch, run=run
        )
        # The replay server refuses groups that do not fit: unknown tokens would crash the embedding on every rank.
        vocabulary = roles.policy.hf.get_input_embeddings().num_embeddings
        reference = FROM_ROLLOUT if roles.reference_comes else ""
        board = {"vocabulary": vocabulary, REFERENCE: reference, UPDATES: updates, **(copies or {})}
        replay.announce(board | {ROUTERS: row_of_routers(roles.policy.routers)})
        fresh = restored.next_version
        if fresh <= known_version:
            fresh = known_version + 2  # the next one may have been published without being written down anywhere
            log.warning(
                "the run folder has policy_version %d but the replay knows of none above %d, so its journal is gone. "
                "Continuing with %d, because no version is used twice",
                *(known_version, restored.next_version - 1, fresh),
            )
        numbers = torch.tensor([restored.next_step, fresh], device=device)
    if dist.is_initialized():
        dist.broadcast(numbers, src=0)
    next_step, next_version = numbers.tolist()
    return Start(step=next_step, policy_version=next_version, parent=version, skipped_steps=skipped)


def highest_version(run_dir: Path) -> int:
    """The largest policy_version named anywhere in a run folder; NO_VERSION if there is none."""
    versions = [NO_VERSION]
    for name in (METRICS_FILE, LEDGER_FILE):
        rows = (row_of(line) for line in tail(run_dir / name))
        versions += [row["policy_version"] for row in rows if row and isinstance(row.get("policy_version"), int)]
    for path in finished(run_dir / CHECKPOINT_DIR):
        with contextlib.suppress(CheckpointError):  # damaged, so not the one to continue from
            versions.append(position_of(path)[1])
    return max(versions)


def kept_rows(run_dir: Path, start: Start) -> int:
    """The step up to which existing rows belong to the line that is continued: another line, with larger versions, may
    have trained its last steps again before it was abandoned (`begin_branch`)."""
    rows = (row for row in read_lines(run_dir / METRICS_FILE).rows if not is_evaluation(row))
    of_others = [row["step"] - 1 for row in rows if row.get("policy_version", NO_VERSION) > start.parent]
    return min([start.step, *of_others])
