"""The loop of supervised fine-tuning: draw, train, evaluate periodically, checkpoint, report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.checks.parallel import ParallelDims
from asyncrl.learner.batch.prefetch import LeasePrefetch
from asyncrl.learner.checkpoints.checkpoint import Checkpoints
from asyncrl.learner.checkpoints.resume import Start
from asyncrl.learner.processes.out_of_memory import one_more_try
from asyncrl.learner.processes.stop import Asked, never
from asyncrl.learner.reporting.step_clock import StepClock
from asyncrl.learner.reporting.step_row import tell_best
from asyncrl.learner.roles import Roles
from asyncrl.learner.step.metrics import Measured, over_ranks
from asyncrl.learner.step.step import TRAINED_TOKENS
from asyncrl.learner.train import (
    Parts,
    Stopped,
    begin_save,
    commit_saved,
    due,
    export,
    guard_of,
    leased,
    save_before_end,
)
from asyncrl.schema import Config
from asyncrl.sft.batches import Drawn, RowBatches
from asyncrl.sft.examples import Example
from asyncrl.sft.settings import SftEvalConfig
from asyncrl.sft.step import agree_on_rows, evaluate, sft_step


@dataclass(frozen=True, slots=True, kw_only=True)
class SftTraining(Parts):
    """Everything that one rank trains with."""

    source: RowBatches
    config: Config
    """The settings as the learner's parts read them; `learner.steps` is that of the whole run."""
    eval: SftEvalConfig
    held_out: Sequence[Example]

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
        CheckpointError: see `Checkpoints.load`.
    """
    if path is None:
        return Start()
    state, _ = checkpoints.load(path, roles)
    checkpoints.begin_branch()
    return Start(step=state.step + 1, policy_version=state.policy_version, skipped_steps=state.skipped_steps)


def train_rows(parts: SftTraining, asked: Asked = never) -> None:
    """Train from `parts.start` to the last step, or until `asked` is true; then trained steps are saved first.

    consumes:     batches of rows, drawn and rendered one step ahead of training by a thread
    waits for:    that thread; the other ranks, in every step; the disk
    unblocked by: its end or failure; the process group's timeout

    Raises:
        DataError: a row cannot be used, or ranks drew different ones. NonFiniteError, CheckpointError, DiskFullError.
        StepMemoryError, ConfigError: see `one_more_try`.
    """
    config, settings, start, steps = parts.config, parts.config.learner, parts.start, parts.config.learner.steps
    guard, shard = guard_of(config, parts), parts.shard
    leases = LeasePrefetch(parts.source, rank=shard, world=parts.shards, wait_s=config.replay.wait_timeout_s)
    clock = StepClock()
    if start.step == 0 and steps:
        measure(parts, 0)
    clock.start()
    for step in range(start.step, steps):
        trained, last = step + 1, step + 1 == steps
        lease = leased(leases, step, steps, asked, parts.device)
        if isinstance(lease, Stopped):
            save_before_end(config, parts, step, step, lease, skipped=guard.skipped)
            return
        clock.lap("wait_batch")
        drawn = parts.source.told(step)
        agree_on_rows(step, drawn.digest, parts.device)
        with one_more_try(config, parts.run_dir, parts.rank):
            measured = sft_step(config, parts.roles, guard, lease, rank=shard)
        measured = over_ranks(measured, parts.device)
        clock.lap("train")
        row = step_row(measured, drawn, clock.next()) | parts.checkpoints.timings()
        commit_saved(parts)  # raises if the running save has failed
        write(parts, trained, row)
        clock.lap("log")
        if trained == steps or due(trained, parts.eval.every, last):
            row |= measure(parts, trained)
            clock.lap("evaluate")
        # After the step's rows are logged: a crash in between would lose them, as the step is never trained again.
        if due(trained, settings.save_every, last):
            begin_save(parts, step, trained, skipped=guard.skipped)
            clock.lap("checkpoint")
        if parts.rank == 0:
            tell_best(parts.checkpoints.best, trained, trained, row, (), {})
    export(config, parts)
    parts.checkpoints.finish_errands()


def write(parts: SftTraining, trained: int, row: dict[str, float]) -> None:
    if parts.log is not None:
        parts.log.write(trained, None, row)


def measure(parts: SftTraining, trained: int) -> dict[str, float]:
    """Evaluate the held-out rows after `trained` steps, as a row of the log; empty if there are none."""
    if not parts.held_out:
        return {}
    with one_more_try(parts.config, parts.run_dir, parts.rank):
        found = evaluate(
            parts.config, parts.roles.policy, parts.held_out, rank=parts.shard, world=parts.shards, device=parts.device
        )
    row = {f"eval/{parts.eval.name}/{name}": value for name, value in found.items()}
    write(parts, trained, row)
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
