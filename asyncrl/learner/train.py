"""The learner's main loop: lease, train, publish, report, and at intervals evaluate and save a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from asyncrl.background import in_background
from asyncrl.checks.evaluations import EvalSet, eval_sets
from asyncrl.checks.parallel import ParallelDims
from asyncrl.data.dataset import source_names
from asyncrl.errors import NoProgress
from asyncrl.evaluation.orders import EvalSummary
from asyncrl.learner.batch.prefetch import LOOK_S, LeasePrefetch, Source
from asyncrl.learner.checkpoints.checkpoint import Checkpoints, LearnerState
from asyncrl.learner.checkpoints.export import export_critic, export_hf
from asyncrl.learner.checkpoints.resume import Start
from asyncrl.learner.model.flops import peak_of
from asyncrl.learner.optimizer.update import NonFiniteGuard
from asyncrl.learner.parallel.collectives import barrier, everywhere, however_long
from asyncrl.learner.processes.out_of_memory import one_more_try
from asyncrl.learner.processes.stop import Asked, agreed, never
from asyncrl.learner.reporting.collective_clock import clock_of
from asyncrl.learner.reporting.profiling import Profile
from asyncrl.learner.reporting.samples import Samples
from asyncrl.learner.reporting.step_clock import StepClock
from asyncrl.learner.reporting.step_row import step_row, tell_best, write_evaluations
from asyncrl.learner.roles import Roles
from asyncrl.learner.step.metrics import Measured, over_ranks, plan_histograms
from asyncrl.learner.step.step import train_step
from asyncrl.learner.step.targets import KL_OF_POLICY
from asyncrl.replay.protocol import LearnerReplay, Lease, TrainedReply
from asyncrl.schema import Config
from asyncrl.spans import span
from asyncrl.storage.best import BestCheckpoint
from asyncrl.storage.checkpoints import EXPORT_DIR
from asyncrl.telemetry.live.tails import SAVING
from asyncrl.telemetry.metrics.log import MetricsLog
from asyncrl.types import StepPlan
from asyncrl.weights.base import Publisher, PublishStats

log = logging.getLogger(__name__)

ASKED = "asked to stop"
STOP_WITHIN_S = 60.0
"""Seconds that copies and exports of checkpoints may still take after a run was asked to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What one rank trains with, in reinforcement learning and in supervised fine-tuning."""

    source: Source
    roles: Roles
    """The state of `start` is already loaded into them."""
    checkpoints: Checkpoints
    start: Start
    log: MetricsLog | None
    """On rank 0."""
    run_dir: Path
    rank: int
    world: int
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(Parts):
    """What one learner rank trains with, in a run or in a rerun of it."""

    source: LearnerReplay
    publisher: Publisher


def train(config: Config, parts: Training, asked: Asked = never) -> int:
    """Train from `parts.start` to `learner.steps`, or until `asked`; then save what is not saved yet, and stop.

    Consumes: step batches, leased from the replay server one step ahead of training.
    Waits for: rollouts to fill the next batch, once the previous step is trained; the sending of the published
        weights, before the optimizer step, and before the next version is announced if no optimizer step was made; the
        other ranks, in every backward; at the end, open evaluations. Each wait has a deadline.
    Unblocked by: the replay server (batches, evaluations); the publisher's thread (engines acknowledged, or were given
        up); `asked`, while it waits for a batch.

    Every rank runs this. Only rank 0 talks to the replay server about anything but leases. Steps count from 0 on the
    wire, as in StepPlan; metrics and checkpoints count trained steps, so the last row is `learner.steps`.
    Evaluations have rows of their own.

    Returns:
        The last published policy_version.

    Raises:
        NoProgress: no batch arrived in time; what was trained is saved.
        NonFiniteError, CheckpointError, WeightsError.
    """
    return _Loop(config, parts, asked).run()


class _Loop:
    """State that `train` keeps between steps."""

    def __init__(self, config: Config, parts: Training, asked: Asked) -> None:
        settings, roles, dims = config.learner, parts.roles, ParallelDims.of(config.learner, parts.world)
        self.config, self.parts, self.asked = config, parts, asked
        self.shard, self.shards = dims.data_rank(parts.rank), dims.data
        self.version = parts.start.policy_version
        self.guard = guard_of(config, parts)
        wait_s = config.replay.wait_timeout_s
        self.leases = LeasePrefetch(parts.source, rank=self.shard, world=self.shards, wait_s=wait_s)
        self.clock, self.collectives = StepClock(), clock_of(roles, parts.world, parts.device)
        self.peak = peak_of(parts.device)
        self.profile = Profile(settings.profile, parts.run_dir, parts.rank, parts.device)
        self.sampled, self.sets = Samples(config.model.path, source_names(config.data)), eval_sets(config)
        self.metrics = {each.name: each.config.reward.metric for each in self.sets}

    def run(self) -> int:
        parts, steps = self.parts, self.config.learner.steps
        self.publish_first()
        self.clock.start()
        for step in range(parts.start.step, steps):
            lease = self.batch(step)
            if isinstance(lease, Stopped):
                save_before_end(self.config, parts, step, self.version, lease, skipped=self.guard.skipped)
                return self.version
            measured = self.step(step, lease)
            reply, sent = self.publish(step)
            row, evaluations = self.report(step, lease, measured, reply, sent)
            if due(step + 1, self.config.learner.save_every, step + 1 == steps):
                begin_save(parts, step, self.version, skipped=self.guard.skipped)
                self.clock.lap("checkpoint")
            if parts.rank == 0:  # after the checkpoint, which may be the one that was measured
                tell_best(parts.checkpoints.best, step + 1, self.version, row, evaluations, self.metrics)
        self.end()
        return self.version

    def publish_first(self) -> None:
        """Publish the weights that training starts from, and request their evaluation."""
        parts, start = self.parts, self.parts.start
        if parts.rank == 0:
            parts.source.publish(policy_version=self.version, parent=start.parent)
        # In the optimizer itself, so that no caller can forget it.
        parts.roles.optimizer.register_step_pre_hook(self.before_step)
        self.send()
        if parts.rank == 0 and start.step < self.config.learner.steps:
            evaluate(self.sets, parts.source, parts.checkpoints.best, trained=start.step, version=self.version)

    def before_step(self, *_: object) -> None:
        """Wait until the published version is read no more: it is sent beside forward and backward."""
        self.parts.publisher.wait()

    @property
    def serve(self) -> Callable[[], None] | None:
        """What all ranks call while they wait for something, if they have to."""
        publisher = self.parts.publisher
        return publisher.serve if publisher.meets else None

    def send(self, told: Future[TrainedReply] | None = None) -> PublishStats:
        """Publish the weights. `told` is the running call of `trained`: the canary is made meanwhile, and the weights
        are sent only after the call returned."""

        def known() -> Iterator[tuple[str, torch.Tensor]]:
            if told is not None:
                told.result()
            yield from self.parts.roles.policy.named_hf_parameters()

        with span("publish", version=self.version):
            return self.parts.publisher.publish(self.version, known())

    def batch(self, step: int) -> Lease | Stopped:
        """Wait for the batch of `step` and request the next one."""
        lease = leased(self.leases, step, self.config.learner.steps, self.asked, self.parts.device, self.serve)
        if isinstance(lease, Stopped):
            self.profile.end(step, last=True)
        else:
            self.clock.lap("wait_batch")
        return lease

    def step(self, step: int, lease: Lease) -> Measured:
        """Train on the batch."""
        config, parts = self.config, self.parts
        roles, device = parts.roles, parts.device
        self.profile.begin(step + 1)
        with (
            one_more_try(config, parts.run_dir, parts.rank),
            span("train step", step=step + 1, version=self.version),
        ):
            measured = train_step(config, roles, self.guard, lease, rank=self.shard)
        measured.ratios |= {name: (seconds, 1.0) for name, seconds in self.collectives.take().items()}
        measured = over_ranks(measured, device)
        control_kl(roles, measured, lease.plan)
        self.clock.lap("train")
        return measured

    def publish(self, step: int) -> tuple[TrainedReply, PublishStats]:
        """Publish the weights after the step as the next policy version."""
        parts, last = self.parts, step + 1 == self.config.learner.steps
        parts.publisher.wait_sent()  # done before the optimizer step, unless there was none: warm-up, a skipped step
        self.version += 1
        # Before the weights are sent: a worker may serve them at once. If the replay server did not know the version,
        # it could be lost with this learner, and the next learner would give the same number to other weights.
        told = None
        if parts.rank == 0:
            trained = partial(parts.source.trained, step=step, policy_version=self.version)
            told = in_background(f"trained-{step}", trained)
        sent = self.send(told)
        reply = TrainedReply() if told is None else told.result()
        if last:
            parts.publisher.wait_sent()  # no later step would report a failure
        self.profile.end(step + 1, last=last)
        barrier()  # otherwise another rank might lease step + 2, two ahead, before this step counts as trained
        self.clock.lap("publish")
        return reply, sent

    def report(
        self, step: int, lease: Lease, measured: Measured, reply: TrainedReply, sent: PublishStats
    ) -> tuple[dict[str, float], tuple[EvalSummary, ...]]:
        """Write the row of the step, before its checkpoint. A step that is saved is never trained again, so a crash
        between the two would lose the row for good. Returns the row (on rank 0) and the evaluations that finished."""
        config, parts, trained = self.config, self.parts, step + 1
        if parts.rank == 0:
            evaluate(self.sets, parts.source, parts.checkpoints.best, trained=trained, version=self.version)
        evaluations = reply.evaluations
        if trained == config.learner.steps and self.sets:
            # Before the last checkpoint: a learner that restarts from it has nothing left to do, and would not wait.
            wait_s = config.replay.wait_timeout_s
            evaluations += last_evaluations(
                parts.source, wait_s, rank=parts.rank, device=parts.device, serve=self.serve
            )
        commit_saved(parts)
        self.clock.lap("evaluate")
        times, row = self.clock.next(), dict[str, float]()
        if parts.log is not None:
            sending = parts.publisher.stats()
            row = step_row(lease, measured, sent, sending, reply, times, parts.world, self.peak)
            row |= parts.checkpoints.timings()
            parts.log.write(trained, self.version, row)
            write_evaluations(parts.log, evaluations, self.metrics)
            parts.log.histograms(trained, plan_histograms(lease.plan) | measured.histograms())
            samples = self.sampled.rows(lease.plan, lease.samples, config.telemetry.samples_per_step)
            dropped = [each.line() for each in reply.dropped[: config.telemetry.samples_per_step]]
            parts.log.samples(trained, samples + dropped)
        self.clock.lap("log")
        return row, evaluations

    def end(self) -> None:
        """Finish a run that was not asked to stop: export the models and complete every checkpoint."""
        export(self.config, self.parts)
        if self.parts.rank == 0:
            self.parts.source.finish()
        self.parts.checkpoints.finish_errands()


def guard_of(config: Config, parts: Parts) -> NonFiniteGuard:
    made = NonFiniteGuard(parts.run_dir / "nonfinite", parts.rank, config.learner.max_nonfinite_steps)
    made.skipped = parts.start.skipped_steps
    return made


@dataclass(frozen=True, slots=True)
class Stopped:
    """Why no further step is trained, the same on all ranks."""

    lost: str = ""
    """Why there is no batch; empty if the run was asked to stop."""


def leased(
    leases: LeasePrefetch,
    step: int,
    steps: int,
    asked: Asked,
    device: torch.device,
    serve: Callable[[], None] | None = None,
) -> Lease | Stopped:
    """Wait for the batch of `step`, and request the next one of the run's `steps`. Collective.

    Args:
        serve: called by all ranks together several times a second while one of them waits.
    """
    while serve is not None and not everywhere(asked() or leases.is_there(step, LOOK_S), device):
        serve()
    leases.wait(step, asked)
    lost = leases.lost()
    if why := agreed(ASKED if asked() else str(lost or ""), device):
        return Stopped() if why == ASKED else Stopped(why)
    lease = leases.take(step)
    if step + 1 < steps:
        leases.ask(step + 1)
    return lease


def begin_save(parts: Parts, step: int, version: int, *, skipped: int) -> None:
    """Start to save the checkpoint after `step`. Collective. It is complete on return, or during later steps
    (`async_save`)."""
    roles = parts.roles
    state = LearnerState(
        step=step,
        policy_version=version,
        skipped_steps=skipped,
        kl_coef=roles.kl_coef,
        norms={name: each.norms for name, each in roles.spikes.items()},
        spikes={name: each.skipped for name, each in roles.spikes.items()},
    )
    parts.checkpoints.begin(state, parts.roles, parts.source.snapshot() if parts.rank == 0 else {})
    commit_saved(parts)


def commit_saved(parts: Parts) -> None:
    """Tell the source which steps are durable. The replay server keeps what was trained after the last of them. Raises
    as `Checkpoints.begin` if a save has failed."""
    for step in parts.checkpoints.saved():
        if parts.rank == 0:
            parts.source.commit(step=step)


def save_before_end(config: Config, parts: Parts, step: int, version: int, why: Stopped, *, skipped: int) -> None:
    """Save the steps that are not saved yet, when the learner stops before `step`. Collective.

    Raises:
        NoProgress: that is why it stops; everything is saved.
    """
    if parts.rank == 0:
        log.info("%s: %s %d", why.lost or ASKED, SAVING, step)
    if step > parts.start.step and not due(step, config.learner.save_every, last=False):
        begin_save(parts, step - 1, version, skipped=skipped)
    parts.checkpoints.finish()
    commit_saved(parts)
    parts.checkpoints.finish_errands(STOP_WITHIN_S)
    if why.lost:
        raise NoProgress(why.lost)


def export(config: Config, parts: Parts) -> None:
    """At the end of a run: export what was trained, and complete every checkpoint. Collective."""
    steps = max(config.learner.steps, parts.start.step)
    roles, rank = parts.roles, parts.rank
    export_hf(roles.policy, config.model, parts.run_dir / EXPORT_DIR, rank, trained=steps)
    if roles.critic is not None:
        source = replace(config.model, path=config.critic.path or config.model.path)
        export_critic(roles.critic.model, source, parts.run_dir / "critic", rank)
    parts.checkpoints.finish()
    commit_saved(parts)


def control_kl(roles: Roles, measured: Measured, plan: StepPlan) -> None:
    """Adapt the KL coefficient of the reward to the KL that all ranks measured in a step. The plain mean over tokens of
    an old policy lies below the KL, and below 0 where the policy has moved away from the reference since."""
    total, tokens = measured.ratios.get(KL_OF_POLICY, (0.0, 0.0))
    if roles.kl_control is not None and tokens:
        sequences = sum(len(group.trajectories) for group in plan.groups)
        roles.kl_coef = roles.kl_control.adapted(roles.kl_coef, total / tokens, sequences)


def due(trained: int, every: int, last: bool) -> bool:
    """Whether an action that happens every `every` steps (0: never), and after the last one, is due now."""
    return every > 0 and (last or trained % every == 0)


def evaluation_due(given: EvalSet, trained: int) -> bool:
    """Whether the weights after `trained` steps are evaluated: at the start, the end, and every `eval.every` steps."""
    return trained in (0, given.config.learner.steps) or due(trained, given.config.eval.every, last=False)


def evaluate(
    sets: Iterable[EvalSet], replay: LearnerReplay, best: BestCheckpoint, *, trained: int, version: int
) -> None:
    """Start an evaluation of each set that is due, on the workers' engines. Results come with a later `trained`."""
    for each in sets:
        if evaluation_due(each, trained):
            if best.metric.startswith(f"eval/{each.name}/"):
                best.asked(trained)
            rows, chunk = each.config.eval.rows, each.config.eval.chunk
            replay.evaluate(step=trained, policy_version=version, eval_set=each.name, rows=rows, chunk=chunk)


def last_evaluations(
    replay: LearnerReplay,
    wait_s: float,
    *,
    rank: int,
    device: torch.device,
    serve: Callable[[], None] | None = None,
) -> tuple[EvalSummary, ...]:
    """Wait for the evaluations that still run when training is over. Collective: the other ranks wait for rank 0.

    An evaluation without progress for `wait_s` seconds is given up with a warning; the training itself succeeded.
    """

    def wait() -> tuple[EvalSummary, ...]:
        try:
            return replay.wait_evaluations(wait_s=wait_s)
        except NoProgress as error:
            log.warning("the last evaluation is missing: %s", error)
            return ()

    return however_long(wait if rank == 0 else tuple, device, serve=serve)
