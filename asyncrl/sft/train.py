"""The loop of supervised fine-tuning: draw, train, evaluate periodically, checkpoint, report."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from asyncrl.checks.parallel import ParallelDims
from asyncrl.config import disk_patience
from asyncrl.learner.batch.prefetch import LeasePrefetch
from asyncrl.learner.checkpoints.checkpoint import Checkpoints, LearnerState
from asyncrl.learner.checkpoints.export import export_hf
from asyncrl.learner.optimizer.update import NonFiniteGuard
from asyncrl.learner.processes.out_of_memory import one_more_try
from asyncrl.learner.processes.stop import Asked, agreed, never
from asyncrl.learner.reporting.step_clock import StepClock
from asyncrl.learner.roles import Roles
from asyncrl.learner.step.metrics import Measured, over_ranks
from asyncrl.learner.train import STOP_WITHIN_S, due
from asyncrl.schema import Config
from asyncrl.sft.batches import Drawn, RowBatches, draws_before, snapshot_of
from asyncrl.sft.examples import Example
from asyncrl.sft.settings import SftEvalConfig
from asyncrl.sft.step import TRAINED_TOKENS, agree_on_rows, evaluate, sft_step
from asyncrl.storage.best import BestCheckpoint
from asyncrl.storage.checkpoints import EXPORT_DIR

log = logging.getLogger(__name__)


class RowLog(Protocol):
    """The log that rank 0 writes rows to (`asyncrl.telemetry.metrics.log.MetricsLog`)."""

    def write(self, step: int, policy_version: int | None, row: dict[str, float]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The position where training begins; equal on all ranks."""

    step: int = 0
    """Number of steps trained before."""
    draw: int = 0
    """Number of rows drawn before."""
    skipped_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SftTraining:
    """Everything that one rank trains with."""

    config: Config
    """The settings as the learner's parts read them; `learner.steps` is that of the whole run."""
    eval: SftEvalConfig
    roles: Roles
    """Already restored to `start`."""
    checkpoints: Checkpoints
    best: BestCheckpoint
    """The best checkpoint of `checkpoints`."""
    start: Start
    batches: RowBatches
    held_out: Sequence[Example]
    log: RowLog
    run_dir: Path
    rank: int
    world: int
    device: torch.device

    @property
    def shard(self) -> int:
        """Which of the `shards` parts of the rows is this rank's."""
        return ParallelDims.of(self.config.learner, self.world).data_rank(self.rank)

    @property
    def shards(self) -> int:
        return ParallelDims.of(self.config.learner, self.world).data


def resumed(checkpoints: Checkpoints, roles: Roles, path: Path | None) -> Start:
    """Restore `roles` from the checkpoint, if there is one. Collective.

    Raises:
        CheckpointError: see `Checkpoints.load`. CheckpointMismatchError: reinforcement learning saved it.
    """
    if path is None:
        return Start()
    draw = draws_before(path)
    state, _ = checkpoints.load(path, roles)
    checkpoints.begin_branch()
    return Start(step=state.step + 1, draw=draw, skipped_steps=state.skipped_steps)


def train_rows(parts: SftTraining, asked: Asked = never) -> None:
    """Train from `parts.start` to the last step, or until `asked` is true; then trained steps are saved first.

    consumes:     batches of rows, drawn and rendered one step ahead of training by a thread
    waits for:    that thread; the other ranks, in every step; the disk
    unblocked by: its end or failure; the process group's timeout; the patience with a full disk

    Raises:
        DataError: a row cannot be used, or ranks drew different ones. NonFiniteError, CheckpointError, DiskFullError.
        StepMemoryError, ConfigError: see `one_more_try`.
    """
    config, batches, start = parts.config, parts.batches, parts.start
    settings, steps = config.learner, config.learner.steps
    guard = NonFiniteGuard(parts.run_dir / "nonfinite", parts.rank, settings.max_nonfinite_steps)
    guard.skipped = start.skipped_steps
    shard, shards = parts.shard, parts.shards
    leases = LeasePrefetch(batches, rank=shard, world=shards, wait_s=config.replay.wait_timeout_s)
    clock = StepClock()
    if start.step == 0 and steps:
        measure(parts, 0)
    clock.start()
    for step in range(start.step, steps):
        trained, last = step + 1, step + 1 == steps
        leases.wait(step, asked)
        if agreed(asked(), parts.device):
            save_before_end(parts, step, guard.skipped)
            return
        lease = leases.take(step)
        if not last:
            leases.ask(step + 1)
        clock.lap("wait_batch")
        drawn = batches.told(step)
        agree_on_rows(step, drawn.digest, parts.device)
        with one_more_try(config, parts.run_dir, parts.rank):
            measured = sft_step(config, parts.roles, guard, lease, rank=shard)
        measured = over_ranks(measured, parts.device)
        clock.lap("train")
        row = step_row(measured, drawn, clock.next()) | parts.checkpoints.timings()
        parts.checkpoints.saved()  # raises if the running save has failed
        if parts.rank == 0:
            parts.log.write(trained, None, row)
        clock.lap("log")
        if trained == steps or due(trained, parts.eval.every, last):
            row |= measure(parts, trained)
            clock.lap("evaluate")
        # After the step's rows are logged: a crash in between would lose them, as the step is never trained again.
        if due(trained, settings.save_every, last):
            begin_save(parts, step, guard.skipped)
            clock.lap("checkpoint")
        if (
            parts.rank == 0
            and parts.best.metric in row
            and parts.best.told(trained, row[parts.best.metric], (trained, trained))
        ):
            log.info("the best checkpoint is now that of step %d", trained)
    export_hf(
        parts.roles.policy, config.model, parts.run_dir / EXPORT_DIR, parts.rank, disk_patience(config), trained=steps
    )
    parts.checkpoints.finish()
    parts.checkpoints.finish_errands()


def measure(parts: SftTraining, trained: int) -> dict[str, float]:
    """Evaluate the held-out rows after `trained` steps, as a row of the log; empty if there are none."""
    if not parts.held_out:
        return {}
    with one_more_try(parts.config, parts.run_dir, parts.rank):
        found = evaluate(
            parts.config, parts.roles.policy, parts.held_out, rank=parts.shard, world=parts.shards, device=parts.device
        )
    row = {f"eval/{parts.eval.name}/{name}": value for name, value in found.items()}
    if parts.rank == 0:
        parts.log.write(trained, None, row)
    return row


def step_row(measured: Measured, drawn: Drawn, times: dict[str, float]) -> dict[str, float]:
    """All metrics of a step, by name."""
    row = measured.row() | times
    row |= {
        "data/rows": float(drawn.rows),
        "data/tokens": float(drawn.tokens),
        "data/loss_tokens": row[TRAINED_TOKENS],
        "data/overlong_dropped": float(drawn.dropped),
        "data/overlong_cut": float(drawn.cut),
        "data/epoch": drawn.epoch,
    }
    row["perf/trained_tokens_per_s"] = row.pop(TRAINED_TOKENS) / times["time/step"]
    row["perf/tokens_per_s"] = drawn.tokens / times["time/step"]
    return row


def begin_save(parts: SftTraining, step: int, skipped: int) -> None:
    """Start saving the checkpoint after `step`: collective. It is complete now, or while later steps are trained."""
    state = LearnerState(step=step, policy_version=step + 1, skipped_steps=skipped)
    parts.checkpoints.begin(state, parts.roles, snapshot_of(parts.batches.course.window(step).stop))


def save_before_end(parts: SftTraining, step: int, skipped: int) -> None:
    """Save what is trained but not yet saved when the run stops before `step`. Collective."""
    if step > parts.start.step and not due(step, parts.config.learner.save_every, last=False):
        begin_save(parts, step - 1, skipped)
    parts.checkpoints.finish()
    parts.checkpoints.finish_errands(STOP_WITHIN_S)
    if parts.rank == 0:
        log.info("asked to stop: the run ends after step %d and saves it", step)
