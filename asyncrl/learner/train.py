"""The learner's main loop: lease, train, publish, report; evaluate and checkpoint now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from asyncrl.checks.evaluations import EvalSet, eval_sets
from asyncrl.checks.learner import early_groups
from asyncrl.checks.parallel import ParallelDims
from asyncrl.config import disk_patience
from asyncrl.data.mixture import source_names
from asyncrl.errors import NoProgress
from asyncrl.evaluation.orders import EvalSummary
from asyncrl.evaluation.samples import to_line
from asyncrl.learner.checkpoint import Checkpoints, LearnerState
from asyncrl.learner.collective_clock import clock_of
from asyncrl.learner.early import Early
from asyncrl.learner.export import export_critic, export_hf
from asyncrl.learner.flops import peak_of, speed
from asyncrl.learner.group_ess import ess_of_groups
from asyncrl.learner.metrics import Bins, Measured, over_ranks, plan_histograms, plan_metrics
from asyncrl.learner.optim import NonFiniteGuard
from asyncrl.learner.out_of_memory import one_more_try
from asyncrl.learner.prefetch import LeasePrefetch
from asyncrl.learner.profiling import Profile
from asyncrl.learner.ranks import barrier, however_long
from asyncrl.learner.resume import Start
from asyncrl.learner.roles import Roles
from asyncrl.learner.samples import Samples
from asyncrl.learner.step import OPERATIONS, PACKED_TOKENS, train_step
from asyncrl.learner.stop import Asked, agreed, never
from asyncrl.replay.protocol import LearnerReplay, Lease, TrainedReply
from asyncrl.schema import Config
from asyncrl.spans import lap, span
from asyncrl.storage.best import BestCheckpoint
from asyncrl.types import StepPlan
from asyncrl.weights.base import Publisher, PublishStats

log = logging.getLogger(__name__)

STOP_WITHIN_S = 60.0
"""What copies and exports of checkpoints get when a run is asked to stop."""


class StepLog(Protocol):
    """Where rank 0 writes rows (`asyncrl.telemetry.metrics.MetricsLog`)."""

    def write(self, step: int, policy_version: int, row: Mapping[str, float]) -> None: ...

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]], eval_set: str = "") -> None: ...

    def histograms(self, step: int, found: Mapping[str, Bins]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What one rank trains with, in a run or in a rerun of it."""

    replay: LearnerReplay
    publisher: Publisher
    roles: Roles
    """Already those of `start` (see `begin`)."""
    checkpoints: Checkpoints
    best: BestCheckpoint
    """The one of `checkpoints`."""
    start: Start
    log: StepLog
    run_dir: Path
    rank: int
    world: int
    device: torch.device


def train(config: Config, parts: Training, asked: Asked = never) -> int:
    """Train from `parts.start` to `learner.steps`, or until `asked`: then what is trained is saved first.

    Consumes: step batches, leased from the replay one step ahead of training; with `learner.early_groups` their first
        groups before (`early`).
    Waits for: rollouts to fill the next batch, once its predecessor is trained; the previous weight broadcast, before
        the next; the copy of the published weights, before the optimizer's step, and before the next version is
        announced if the policy made no step; the other ranks, in every backward; at the end, open evaluations. Each
        wait has a deadline.
    Unblocked by: the replay server (batches, evaluations); the publisher's thread (engines acknowledged, or given up);
        `asked`, while it waits for a batch.

    Every rank runs this; rank 0 alone talks to the replay about anything but leases. Steps count from 0 on the wire,
    as in StepPlan; what users see (metrics, checkpoints) counts trained steps, so the last row is `learner.steps`.
    Evaluations have rows of their own.

    Returns:
        The last published policy_version.

    Raises:
        NoProgress: no batch in time. NonFiniteError, CheckpointError, WeightsError.
    """
    settings, steps = config.learner, config.learner.steps
    replay, publisher, roles, start = parts.replay, parts.publisher, parts.roles, parts.start
    rank, world, device = parts.rank, parts.world, parts.device
    guard = NonFiniteGuard(parts.run_dir / "nonfinite", rank, settings.max_nonfinite_steps)
    guard.skipped = start.skipped_steps
    dims = ParallelDims.of(settings, world)
    shard = dims.data_rank(rank)
    leases = LeasePrefetch(replay, rank=shard, world=dims.data, wait_s=config.replay.wait_timeout_s)
    early = Early(config, roles, replay, leases, shard, dims.data, device, rank == 0) if early_groups(config) else None
    clock, collectives = StepClock(), clock_of(roles, world, device)
    peak, profile = peak_of(device), Profile(settings.profile, parts.run_dir, rank, device)
    sampled, sets = Samples(config.model.path, source_names(config.data)), eval_sets(config)
    metrics = {each.name: each.config.reward.metric for each in sets}

    version = start.policy_version
    if rank == 0:
        replay.publish(policy_version=version, parent=start.parent)
    hold_back(roles.optimizer, publisher)
    with span("publish", version=version):
        publisher.publish(version, roles.policy.named_hf_parameters())
    if rank == 0 and start.step < steps:
        evaluate(sets, replay, parts.best, trained=start.step, version=version)

    clock.start()
    for step in range(start.step, steps):
        trained, last, begun = step + 1, step + 1 == steps, None
        if early is not None:
            profile.begin(trained)
            with one_more_try(config, parts.run_dir, rank):
                begun = early.begin(step, asked, clock.lap)
        leases.wait(step, asked)
        if agreed(asked(), device):
            profile.end(step, last=True)
            save_before_end(config, parts, step, version, skipped=guard.skipped)
            return version
        lease = leases.take(step)
        if not last:
            leases.ask(step + 1)
        clock.lap("wait_batch")

        profile.begin(trained)
        with one_more_try(config, parts.run_dir, rank), span("train step", step=trained, version=version):
            measured = train_step(config, roles, guard, lease, rank=shard, world=dims.data, device=device, begun=begun)
        measured.ratios |= {name: (seconds, 1.0) for name, seconds in collectives.take().items()}
        measured = over_ranks(measured, device)
        control_kl(roles, measured, lease.plan)
        clock.lap("train")

        publisher.wait_copied()  # over since the optimizer's step, unless there was none: warm-up, or a skipped step
        version += 1
        # Before the weights leave: a worker may serve them at once, and a version that the replay does not know could
        # be sent, lost with this learner and given to other weights by the next one.
        ess = ess_of_groups(measured.group_weights, len(lease.plan.groups)) if measured.group_weights else ()
        reply = replay.trained(step=step, policy_version=version, ess=ess) if rank == 0 else TrainedReply()
        with span("publish", version=version):
            sent = publisher.publish(version, roles.policy.named_hf_parameters())
        if last:
            publisher.wait_copied()  # no step follows that would tell of a failure
        profile.end(trained, last=last)
        barrier()  # without it another rank may lease step + 2 before this step counts as trained, two ahead
        clock.lap("publish")

        if rank == 0:
            evaluate(sets, replay, parts.best, trained=trained, version=version)
        evaluations = reply.evaluations
        if last and sets:  # before the last checkpoint: after it a restarted learner has nothing to do
            evaluations += last_evaluations(replay, config.replay.wait_timeout_s, rank=rank, device=device)
        # Before the checkpoint: of a step that is never trained again, a death in between would leave no row for good.
        row: dict[str, float] = {}
        commit_saved(parts)
        clock.lap("evaluate")
        times = clock.next()
        if rank == 0:
            row = step_row(lease, measured, sent, publisher.stats(), reply, times, world, peak)
            row |= parts.checkpoints.timings()
            parts.log.write(trained, version, row)
            write_evaluations(parts.log, evaluations, metrics)
            parts.log.histograms(trained, plan_histograms(lease.plan))
            parts.log.samples(trained, sampled.rows(lease.plan, lease.samples, config.telemetry.samples_per_step))
        clock.lap("log")
        if due(trained, settings.save_every, last):
            begin_save(parts, step, version, skipped=guard.skipped)
            clock.lap("checkpoint")
        if rank == 0:  # after the checkpoint: it may be the one that was measured
            tell_best(parts.best, trained, version, row, evaluations, metrics)

    patience = disk_patience(config)
    export_hf(roles.policy, config.model, parts.run_dir / "hf", rank, patience, trained=steps)
    if roles.critic is not None:
        export_critic(roles.critic.model, config.model, parts.run_dir / "critic", rank, patience)
    parts.checkpoints.finish()
    commit_saved(parts)
    if rank == 0:
        replay.finish()
    parts.checkpoints.finish_errands()
    return version


def begin_save(parts: Training, step: int, version: int, *, skipped: int) -> None:
    """Start the checkpoint after `step`: collective. It is whole now, or while later steps are trained."""
    roles = parts.roles
    state = LearnerState(
        step=step,
        policy_version=version,
        skipped_steps=skipped,
        kl_coef=roles.kl_coef,
        norms={name: each.norms for name, each in roles.spikes.items()},
        spikes={name: each.skipped for name, each in roles.spikes.items()},
    )
    parts.checkpoints.begin(state, parts.roles, parts.replay.snapshot() if parts.rank == 0 else {})
    commit_saved(parts)


def commit_saved(parts: Training) -> None:
    """The replay's note of what is durable by now: until then it keeps what was trained after the checkpoint before."""
    for step in parts.checkpoints.saved():
        if parts.rank == 0:
            parts.replay.commit(step=step)


def save_before_end(config: Config, parts: Training, step: int, version: int, *, skipped: int) -> None:
    """What is trained but not saved yet when the learner stops before `step`. Collective."""
    if step > parts.start.step and not due(step, config.learner.save_every, last=False):
        begin_save(parts, step - 1, version, skipped=skipped)
    parts.checkpoints.finish()
    commit_saved(parts)
    parts.checkpoints.finish_errands(STOP_WITHIN_S)
    if parts.rank == 0:
        log.info("asked to stop: ends after step %d, saved", step)


def hold_back(optimizer: torch.optim.Optimizer, publisher: Publisher) -> None:
    """Let no step change weights that are still being copied: a version is read beside the next forward and backward.

    In the optimizer itself, so that nobody who lets it step can forget to wait.
    """

    def wait(*_: object) -> None:
        publisher.wait_copied()

    optimizer.register_step_pre_hook(wait)


def control_kl(roles: Roles, measured: Measured, plan: StepPlan) -> None:
    """Adapt the price of the KL in the reward to what all ranks measured in a step."""
    if "kl/in_reward" in measured.ratios:
        total, tokens = measured.ratios["kl/in_reward"]
        if tokens:
            roles.control_kl(total / tokens, sum(len(group.trajectories) for group in plan.groups))


def due(trained: int, every: int, last: bool) -> bool:
    """Whether something done every so many steps (0: never), and after the last one, is to be done now."""
    return every > 0 and (last or trained % every == 0)


def evaluation_due(given: EvalSet, trained: int) -> bool:
    """Whether the weights after so many steps are to be evaluated: the first, the last, and every so many between."""
    every = given.config.eval.every
    between = every > 0 and trained % every == 0
    return trained in (0, given.config.learner.steps) or between


def evaluate(
    sets: Iterable[EvalSet], replay: LearnerReplay, best: BestCheckpoint, *, trained: int, version: int
) -> None:
    """Start an evaluation of each set that is due, on the workers' engines; results come with a later `trained`."""
    for each in sets:
        if evaluation_due(each, trained):
            if best.metric.startswith(f"eval/{each.name}/"):
                best.asked(trained)
            rows, chunk = each.config.eval.rows, each.config.eval.chunk
            replay.evaluate(step=trained, policy_version=version, eval_set=each.name, rows=rows, chunk=chunk)


def last_evaluations(
    replay: LearnerReplay, wait_s: float, *, rank: int, device: torch.device
) -> tuple[EvalSummary, ...]:
    """What is still being evaluated when training is over. Collective: the other ranks wait with rank 0.

    An evaluation that gets nowhere for `wait_s` is given up with a warning: the weights are trained all the same.
    """

    def wait() -> tuple[EvalSummary, ...]:
        try:
            return replay.wait_evaluations(wait_s=wait_s)
        except NoProgress as error:
            log.warning("the last evaluation is missing: %s", error)
            return ()

    return however_long(wait if rank == 0 else tuple, device)


def write_evaluations(log: StepLog, summaries: Iterable[EvalSummary], metrics: Mapping[str, str]) -> None:
    """A row each, at the step of the oldest weights that it measured.

    Args:
        metrics: what the mean of each set is called, see `reward.metric`.
    """
    for summary in summaries:
        # One version per step, and none is asked for that an earlier learner published.
        step = summary.step + summary.version_min - summary.policy_version
        log.write(step, summary.version_min, evaluation_metrics(summary, metrics[summary.eval_set]))
        log.samples(step, [to_line(sample) for sample in summary.samples], summary.eval_set)


def evaluation_metrics(summary: EvalSummary, metric: str) -> dict[str, float]:
    """`eval/<name>/*`; the mean is called `metric`, other figures as they are."""
    name = f"eval/{summary.eval_set}"
    row = {
        f"{name}/count": float(summary.count),
        f"{name}/failed": float(summary.failed),
        f"{name}/version_min": float(summary.version_min),
        f"{name}/version_max": float(summary.version_max),
        f"{name}/superseded": float(summary.superseded),
    }
    if summary.count:  # with every row failed nothing is known of the policy: that is no reward of 0
        row |= {f"{name}/{metric}": summary.mean}
        row |= {f"{name}/{metric}_low": summary.low, f"{name}/{metric}_high": summary.high}
    return row | {f"{name}/{figure}": value for figure, value in summary.figures.items()}


def tell_best(
    best: BestCheckpoint,
    trained: int,
    version: int,
    row: Mapping[str, float],
    summaries: Iterable[EvalSummary],
    metrics: Mapping[str, str],
) -> None:
    """What `learner.keep_best` is by now: of the step just trained, and of evaluations that came with it."""
    found = [
        (
            each.step,
            evaluation_metrics(each, metrics[each.eval_set]).get(best.metric),
            (each.version_min, each.version_max),
        )
        for each in summaries
        if best.metric.startswith(f"eval/{each.eval_set}/")
    ]
    if best.metric in row:
        found.append((trained, row[best.metric], (version, version)))
    for step, value, versions in found:
        if best.told(step, value, versions):
            log.info("the best checkpoint is that of step %d now: %s %g", step, best.metric, value)


def step_row(
    lease: Lease,
    measured: Measured,
    sent: PublishStats,
    sending: Mapping[str, float],
    reply: TrainedReply,
    times: dict[str, float],
    ranks: int,
    peak: float | None,
) -> dict[str, float]:
    """Everything known about a step, by metric name.

    Args:
        peak: FLOP/s of a rank's GPU, see `peak_of`.
    """
    row = dict(reply.metrics) | plan_metrics(lease.plan) | measured.row()
    row |= {"weights/wait_previous_s": sent.wait_previous_s, "weights/bytes": float(sent.nbytes)}
    row |= dict(sending) | times
    seconds = times["time/step"]
    row["idle/learner"] = times["time/wait_batch"] / seconds
    row["perf/trained_tokens_per_s"] = row.pop("perf/trained_tokens") / seconds
    trained_s = times["time/train"] + times.get("time/early", 0.0)
    row |= speed(row.pop(OPERATIONS), row.pop(PACKED_TOKENS), trained_s, ranks, peak)
    row["perf/groups_per_s"] = len(lease.plan.groups) / seconds
    return row


SPANS = {"wait_batch": "wait for a batch", "early": "train before the batch is full", "log": "write the row"}
"""What laps are called in a trace, where they are not called alike."""


@dataclass(slots=True)
class StepClock:
    """Where the seconds went: the laps of a step are all of it, and the steps all of the time. The row of a step and
    its checkpoint count for the step that comes after it."""

    now: Callable[[], float] = time.perf_counter
    laps: dict[str, float] = field(default_factory=dict)
    started: float = 0.0
    mark: float = 0.0

    def start(self) -> None:
        self.laps = {}
        self.started = self.mark = self.now()
        lap("start")

    def lap(self, name: str) -> None:
        """Everything since the last lap was `name`; what is of one name is added up."""
        now = self.now()
        self.laps[name] = self.laps.get(name, 0.0) + now - self.mark
        self.mark = now
        lap(SPANS.get(name, name))

    def next(self) -> dict[str, float]:
        """`time/*` in seconds, of the step that ended with the last lap; the next one began then."""
        row = {f"time/{name}": seconds for name, seconds in self.laps.items()} | {"time/step": self.mark - self.started}
        self.laps, self.started = {}, self.mark
        return row
