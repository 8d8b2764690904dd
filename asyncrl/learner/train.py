"""The learner's main loop: lease, train, publish, report; evaluate and checkpoint now and then."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from asyncrl.learner.checkpoint import Checkpoints, LearnerState
from asyncrl.learner.export import export_critic, export_hf
from asyncrl.learner.metrics import Measured, over_ranks, plan_metrics, sample_rows
from asyncrl.learner.optim import NonFiniteGuard
from asyncrl.learner.prefetch import LeasePrefetch
from asyncrl.learner.ranks import barrier
from asyncrl.learner.resume import Start
from asyncrl.learner.roles import Roles
from asyncrl.learner.step import train_step
from asyncrl.replay.base import LearnerReplay, Lease, TrainedReply
from asyncrl.schema import Config
from asyncrl.types import EvalSummary, StepPlan
from asyncrl.weights.base import Publisher, PublishStats


class StepLog(Protocol):
    """Where rank 0 writes rows (`asyncrl.telemetry.metrics.MetricsLog`)."""

    def write(self, step: int, policy_version: int, row: Mapping[str, float]) -> None: ...

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What one rank trains with, in a run or in a rerun of it."""

    replay: LearnerReplay
    publisher: Publisher
    roles: Roles
    """Already those of `start` (see `begin`)."""
    checkpoints: Checkpoints
    start: Start
    log: StepLog
    run_dir: Path
    rank: int
    world: int
    device: torch.device


def train(config: Config, parts: Training) -> int:
    """Train from `parts.start` to `learner.steps`.

    Consumes: step batches, leased from the replay one step ahead of training.
    Waits for: rollouts to fill the next batch, once its predecessor is trained; the previous weight broadcast, before
        the next; the copy of the published weights, before the optimizer's step, and before the next version is
        announced if the policy made no step; the other ranks, in every backward; at the end, open evaluations. Each
        wait has a deadline.
    Unblocked by: the replay server (batches, evaluations); the publisher's thread (engines acknowledged, or given up).

    Every rank runs this; rank 0 alone talks to the replay about anything but leases. Steps count from 0 on the wire,
    as in StepPlan; what users see (metrics, checkpoints) counts trained steps, so the last row is `learner.steps`.

    Returns:
        The last published policy_version.

    Raises:
        NoProgress: no batch, or no evaluation result, in time. NonFiniteError, CheckpointError, WeightsError.
    """
    settings, steps = config.learner, config.learner.steps
    replay, publisher, roles, start = parts.replay, parts.publisher, parts.roles, parts.start
    rank, world, device = parts.rank, parts.world, parts.device
    guard = NonFiniteGuard(parts.run_dir / "nonfinite", rank, settings.max_nonfinite_steps)
    guard.skipped = start.skipped_steps
    leases = LeasePrefetch(replay, rank=rank, world=world, wait_s=config.replay.wait_timeout_s)
    clock = StepClock()

    version = start.policy_version
    if rank == 0:
        replay.publish(policy_version=version, parent=start.parent)
    hold_back(roles.optimizer, publisher)
    publisher.publish(version, roles.policy.named_hf_parameters())
    if rank == 0 and start.step == 0:
        evaluate(config, replay, trained=0, version=version)

    for step in range(start.step, steps):
        trained, last = step + 1, step + 1 == steps
        clock.start()
        lease = leases.take(step)
        if not last:
            leases.ask(step + 1)
        clock.lap("wait_batch")

        measured = train_step(config, roles, guard, lease, rank=rank, world=world, device=device)
        measured = over_ranks(measured, device)
        control_kl(roles, measured, lease.plan)
        clock.lap("train")

        publisher.wait_copied()  # over since the optimizer's step, unless there was none: warm-up, or a skipped step
        version += 1
        # Before the weights leave: a worker may serve them at once, and a version that the replay does not know could
        # be sent, lost with this learner and given to other weights by the next one.
        reply = replay.trained(step=step, policy_version=version) if rank == 0 else TrainedReply()
        sent = publisher.publish(version, roles.policy.named_hf_parameters())
        if last:
            publisher.wait_copied()  # no step follows that would tell of a failure
        barrier()  # without it another rank may lease step + 2 before this step counts as trained, two ahead
        clock.lap("publish")

        if rank == 0 and due(trained, config.eval.every, last):
            evaluate(config, replay, trained=trained, version=version)
        final: dict[str, float] = {}
        if rank == 0 and last:  # before the checkpoint of the last step: after it a restarted learner has nothing to do
            final = evaluation_metrics(replay.wait_evaluations(wait_s=config.replay.wait_timeout_s))
        if due(trained, settings.save_every, last):
            state = LearnerState(step=step, policy_version=version, skipped_steps=guard.skipped, kl_coef=roles.kl_coef)
            parts.checkpoints.save(state, roles, replay.snapshot() if rank == 0 else {})
            if rank == 0:
                replay.commit(step=step)
            clock.lap("checkpoint")

        if rank == 0:
            row = step_row(lease, measured, sent, publisher.stats(), reply, clock.stop())
            parts.log.write(trained, version, row | final)
            parts.log.samples(trained, sample_rows(lease.samples, config.telemetry.samples_per_step))

    export_hf(roles.policy, config.model, parts.run_dir / "hf", rank)
    if roles.critic is not None:
        export_critic(roles.critic.model, config.model, parts.run_dir / "critic", rank)
    if rank == 0:
        replay.finish()
    return version


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


def evaluate(config: Config, replay: LearnerReplay, *, trained: int, version: int) -> None:
    """Start an evaluation on the workers' engines; its result comes with a later `trained`."""
    if config.eval.every > 0:
        replay.evaluate(
            step=trained,
            policy_version=version,
            eval_set=config.eval.name,
            rows=config.eval.rows,
            chunk=config.eval.chunk,
        )


def evaluation_metrics(summaries: Iterable[EvalSummary]) -> dict[str, float]:
    """`eval/<name>/*`; `step` is the trained steps at which the evaluation was asked for."""
    row: dict[str, float] = {}
    for summary in sorted(summaries, key=lambda summary: summary.step):  # of two of one set the newer stays
        name = f"eval/{summary.eval_set}"
        if summary.count:  # with every row failed nothing is known of the policy: that is no accuracy of 0
            row[f"{name}/accuracy"] = summary.accuracy
        row[f"{name}/count"] = float(summary.count)
        row[f"{name}/failed"] = float(summary.failed)
        row[f"{name}/step"] = float(summary.step)
        row[f"{name}/version_min"] = float(summary.version_min)
        row[f"{name}/version_max"] = float(summary.version_max)
    return row


def step_row(
    lease: Lease,
    measured: Measured,
    sent: PublishStats,
    sending: Mapping[str, float],
    reply: TrainedReply,
    times: dict[str, float],
) -> dict[str, float]:
    """Everything known about a step, by metric name."""
    row = dict(reply.metrics) | plan_metrics(lease.plan) | measured.row()
    row |= {"weights/wait_previous_s": sent.wait_previous_s, "weights/bytes": float(sent.nbytes)}
    row |= dict(sending) | times
    seconds = times["time/step"]
    row["idle/learner"] = times["time/wait_batch"] / seconds
    row["perf/trained_tokens_per_s"] = row.pop("perf/trained_tokens") / seconds
    row["perf/groups_per_s"] = len(lease.plan.groups) / seconds
    return row | evaluation_metrics(reply.evaluations)


@dataclass(slots=True)
class StepClock:
    """Where the seconds of one step went."""

    laps: dict[str, float] = field(default_factory=dict)
    started: float = 0.0
    mark: float = 0.0

    def start(self) -> None:
        self.laps = {}
        self.started = self.mark = time.perf_counter()

    def lap(self, name: str) -> None:
        """Everything since the last lap was `name`."""
        now = time.perf_counter()
        self.laps[name] = now - self.mark
        self.mark = now

    def stop(self) -> dict[str, float]:
        """`time/*` in seconds."""
        laps = {f"time/{name}": seconds for name, seconds in self.laps.items()}
        return laps | {"time/step": time.perf_counter() - self.started}
