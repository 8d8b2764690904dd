"""One train step on one lease: pack, score, advantages; then for each minibatch forward, loss, backward, update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.learner.batch.micro_batch import MicroBatch
from asyncrl.learner.batch.plan import Budget, MinibatchPlan, plan_minibatches
from asyncrl.learner.hook import AFTER, BEFORE
from asyncrl.learner.model.building import compute_dtype
from asyncrl.learner.model.critic import CriticModel, value_loss
from asyncrl.learner.model.flops import operations, padding, passes_of
from asyncrl.learner.optimizer.update import NonFiniteGuard, UpdateReport, apply_update, learning_rate
from asyncrl.learner.parallel.collectives import sum_over_data
from asyncrl.learner.roles import Critic, Roles
from asyncrl.learner.step.gradients import accumulate, summed
from asyncrl.learner.step.memory_peak import begin_peak, peak_row
from asyncrl.learner.step.metrics import Measured
from asyncrl.learner.step.scoring import scored_batches
from asyncrl.learner.step.targets import with_targets
from asyncrl.losses import Denominators
from asyncrl.losses.anchor import ema_update
from asyncrl.losses.diagnostics import ess_lr_scale
from asyncrl.replay.protocol import Lease
from asyncrl.schema import Config
from asyncrl.settings.loss.meaning import scales_learning_rate
from asyncrl.spans import span

TRAINED_TOKENS = "perf/trained_tokens"
OPERATIONS, PACKED_TOKENS = "perf/operations", "perf/packed_tokens"
"""Summed over all ranks; `model.flops.speed` turns them into metrics."""


def train_step(config: Config, roles: Roles, guard: NonFiniteGuard, lease: Lease, *, rank: int) -> Measured:
    """Train `updates_per_batch` optimizer steps on a lease, `epochs_per_batch` times. Collective over the ranks.

    Everything is scored before the first of them and holds for all: a second pass has the same anchor as the first.

    Returns:
        This rank's numbers; what is the same on every rank is counted only on rank 0.

    Raises:
        NonFiniteError: too many steps in a row were skipped.
    """
    plan, settings, device = lease.plan, config.learner, roles.policy.device
    begin_peak(device)
    minibatches = plan_minibatches(
        plan, rank=rank, updates=settings.updates_per_batch, budget=Budget.of(settings), in_rows=roles.in_rows
    )
    members = [members for minibatch in minibatches for members in minibatch.micro_batches]
    batches = scored_batches(config, roles, lease, members, device)
    batches, measured = with_targets(plan, batches, config.advantage, roles.kl_coef, device)
    if rank == 0:  # also the row of a step without a fresh token, which has no update, has these names
        measured.add(replace(of_an_update(NO_UPDATE, 0.0), updates=0.0))
    shares = list(zip(minibatches, shares_of(batches, minibatches), strict=True))
    for index, (minibatch, share) in enumerate(shares * settings.epochs_per_batch):
        report, numbers = update_policy(config, roles, share, minibatch.denominators, plan.step, index=index)
        measured.add(numbers)
        if rank == 0:
            measured.add(of_an_update(report, minibatch.denominators.tokens))
        if roles.critic is not None:
            fit, numbers = update_critic(config, roles, roles.critic, share, minibatch.denominators, plan.step)
            measured.add(numbers)
            # One guard for both: an applied step of the critic must not hide that the policy's never succeeds.
            report = fit if report.applied or report.spike else report
        guard.observe(plan.step + 1, report, share)
    warming_up = plan.step < config.critic.warmup_steps
    passes = passes_of(adapted=roles.policy.adapters is not None, warming_up=warming_up)
    measured.totals[OPERATIONS] = settings.epochs_per_batch * operations(roles.policy.work, batches, passes)
    measured.totals[PACKED_TOKENS] = float(sum(len(batch.input_ids) for batch in batches))
    measured.ratios |= padding(batches, in_rows=roles.in_rows, compute=compute_dtype(config.model.dtype, device))
    measured.maxima |= peak_row(config.model, roles, batches, device)
    if rank == 0:
        measured.totals |= _of_the_step(config, roles, guard)
    return measured


def _of_the_step(config: Config, roles: Roles, guard: NonFiniteGuard) -> dict[str, float]:
    """Numbers that are the same on every rank."""
    trained = (parameter for parameter in roles.policy.parameters() if parameter.requires_grad)
    told = {"optim/trained_parameters": float(sum(parameter.numel() for parameter in trained))}
    told["optim/nonfinite_steps"] = float(guard.skipped)
    if roles.spikes:
        told["optim/spikes_skipped"] = float(sum(each.skipped for each in roles.spikes.values()))
    if config.advantage.kl_coef > 0:
        told["kl/coef"] = roles.kl_coef
    return told


def of_an_update(report: UpdateReport, tokens: float) -> Measured:
    """Numbers that are the same on every rank."""
    optim = {"optim/lr": report.lr, "optim/grad_norm": report.grad_norm, "loss/total": report.loss}
    return Measured(updates=1.0, per_update=optim, totals={TRAINED_TOKENS: tokens})


NO_UPDATE = UpdateReport(loss=0.0, grad_norm=0.0, applied=True, lr=0.0)


def shares_of(batches: Sequence[MicroBatch], minibatches: Sequence[MinibatchPlan]) -> list[Sequence[MicroBatch]]:
    shares, start = [], 0
    for minibatch in minibatches:
        stop = start + len(minibatch.micro_batches)
        shares.append(batches[start:stop])
        start = stop
    return shares


def update_policy(
    config: Config,
    roles: Roles,
    batches: Sequence[MicroBatch],
    denominators: Denominators,
    step: int,
    *,
    index: int = 0,
) -> tuple[UpdateReport, Measured]:
    """Make one optimizer step of the policy. While the critic warms up, compute only the loss and its diagnostics.

    Args:
        index: number of the update within `step`.
    """
    if step < config.critic.warmup_steps:
        with torch.no_grad():
            loss, measured = accumulate(config, roles.policy, batches, denominators)
        roles.policy.settle()
        total = float(sum_over_data(loss.double().cpu(), roles.policy.device))
        return replace(NO_UPDATE, loss=total), measured
    loss, measured = accumulate(config, roles.policy, batches, denominators)
    rate = learning_rate(step, config.learner, first=config.critic.warmup_steps)
    if scales_learning_rate(config.loss):
        rate *= ess_lr_scale(ess_of_sequences(measured, roles.policy.device))
    parameters = [parameter for parameter in roles.policy.parameters() if parameter.requires_grad]
    told = roles.call_hook(BEFORE, step, index)
    clip, limit = config.learner.clip_norm, roles.norm_limit("policy")
    with span("optimizer step"):
        report = apply_update(parameters, roles.optimizer, loss=loss, lr=rate, clip_norm=clip, limit=limit)
    roles.note_norm(report, "policy", step + 1)
    if roles.average is not None and report.applied:
        ema_update(roles.average.parameters(), parameters, config.learner.proximal_ema)
    if roles.hook is not None and not report.applied:
        # Without gradients the step changes nothing, but it waits until the weights are no longer being copied: the
        # hook may write to them, and a version that is copied or sent meanwhile would be a mixture of two.
        roles.optimizer.step()
    measured.per_update |= told | roles.call_hook(AFTER, step, index, report)
    return report, measured


def update_critic(
    config: Config,
    roles: Roles,
    critic: Critic,
    batches: Sequence[MicroBatch],
    denominators: Denominators,
    step: int,
) -> tuple[UpdateReport, Measured]:
    """Make one optimizer step of the critic towards the targets computed before the first update on the batch."""
    loss = fit_values(config, critic.model, batches, denominators)
    rate = learning_rate(step, config.learner, config.critic.lr)
    parameters = list(critic.model.parameters())
    clip, limit = config.learner.clip_norm, roles.norm_limit("critic")
    report = apply_update(parameters, critic.optimizer, loss=loss, lr=rate, clip_norm=clip, limit=limit)
    roles.note_norm(report, "critic", step + 1)
    numbers = {"loss": report.loss, "grad_norm": report.grad_norm, "lr": report.lr}
    return report, Measured(ratios={f"critic/{name}": (value, 1.0) for name, value in numbers.items()})


def fit_values(config: Config, model: CriticModel, batches: Sequence[MicroBatch], denominators: Denominators) -> Tensor:
    """Accumulate the gradients of the value loss of a minibatch; returns this rank's share of the loss."""

    def loss_of(batch: MicroBatch) -> Tensor:
        assert batch.value_targets is not None and batch.values is not None
        return value_loss(
            model(batch),
            batch.value_targets,
            batch.values,
            batch.loss_mask,
            config.critic.value_clip,
            denominators.tokens,
        )

    return summed(model, batches, loss_of)


def ess_of_sequences(measured: Measured, device: torch.device) -> float:
    """Effective sample size over N of the raw sequence ratios of a minibatch, over all ranks; 1 if there are none."""
    *_, weights, squares, _, count = measured.sequences["ratio/E"]
    weights, squares, count = sum_over_data(
        torch.tensor([weights, squares, count], dtype=torch.float64), device
    ).tolist()
    return weights**2 / (count * squares) if squares > 0 else 1.0
