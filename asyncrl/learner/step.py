"""One train step on one lease: pack, forward, loss, backward, update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.learner.batch import MicroBatch, pack, step_advantages
from asyncrl.learner.metrics import Measured
from asyncrl.learner.model import PolicyModel, set_gradient_sync
from asyncrl.learner.optim import NonFiniteGuard, apply_update, learning_rate
from asyncrl.learner.plan import plan_minibatches
from asyncrl.losses import Denominators, LossInputs, policy_loss
from asyncrl.losses.config import proximal_source
from asyncrl.replay.base import Lease


def train_step(
    config: Config,
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    guard: NonFiniteGuard,
    lease: Lease,
    *,
    rank: int,
    world: int,
    device: torch.device,
) -> Measured:
    """Train `updates_per_batch` optimizer steps on a lease; collective over the ranks.

    Returns:
        This rank's numbers; the `optim/*` of them are the same on every rank and counted on rank 0 only.

    Raises:
        NonFiniteError: too many steps in a row were skipped.
    """
    plan, settings = lease.plan, config.learner
    advantages = step_advantages(plan, config.advantage)
    minibatches = plan_minibatches(
        plan, rank=rank, updates=settings.updates_per_batch, budget=settings.max_tokens_per_microbatch
    )
    packed = [[pack(lease, members, advantages, device) for members in m.micro_batches] for m in minibatches]
    anchors = proximal_logprobs(config, model, packed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate = learning_rate(plan.step, settings)
    measured = Measured(totals={"perf/trained_tokens": 0.0})
    norms: list[float] = []
    losses: list[float] = []
    for minibatch, batches, proximal in zip(minibatches, packed, anchors, strict=True):
        loss, numbers = accumulate(config, model, batches, proximal, minibatch.denominators, world)
        report = apply_update(parameters, optimizer, loss=loss, lr=rate, clip_norm=settings.clip_norm)
        guard.observe(plan.step, report, batches)
        measured.add(numbers)
        norms.append(report.grad_norm)
        losses.append(report.loss)
        measured.totals["perf/trained_tokens"] += minibatch.denominators.tokens if rank == 0 else 0.0
    if rank == 0:
        count = max(1, len(losses))
        measured.totals |= {"optim/lr": rate, "optim/nonfinite_steps": float(guard.skipped)}
        measured.totals |= {"loss/total": sum(losses) / count, "optim/grad_norm": sum(norms) / count}
    return measured


def accumulate(
    config: Config,
    model: PolicyModel,
    batches: Sequence[MicroBatch],
    proximal: Sequence[Tensor | None],
    denominators: Denominators,
    world: int,
) -> tuple[Tensor, Measured]:
    """Add up the gradients of all micro-batches of a minibatch; ranks are summed with the last one."""
    total = torch.zeros((), device=batches[0].input_ids.device)
    measured = Measured()
    for i, (batch, anchor) in enumerate(zip(batches, proximal, strict=True)):
        set_gradient_sync(model, i == len(batches) - 1)
        logprobs, entropy = score(config, model, batch)
        inputs = LossInputs(
            learner_logprobs=logprobs,
            behavior_logprobs=batch.behavior_logprobs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            sequence_ids=batch.sequence_ids,
            group_ids=batch.group_ids,
            proximal_logprobs=logprobs.detach() if anchors_at_current(config) else anchor,
            entropy=entropy,
            staleness=batch.staleness,
            group_tokens=batch.group_tokens,
        )
        out = policy_loss(inputs, config.loss, denominators)
        # The denominators already count all ranks, so ranks must be summed; FSDP averages them.
        (out.loss * world).backward()
        total = total + out.loss.detach()
        numbers = Measured.of(out.sums, out.maxima, out.parts)
        sequences = float(len(batch.packing.cu_seqlens) - 1) if len(batch.loss_positions) else 0.0
        numbers.ratios["completion/truncated"] = float(batch.truncated), sequences
        measured.add(numbers)
    return total, measured


def score(config: Config, model: PolicyModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """learner_logprobs, entropy: [T] each, at the sampling temperature (greedy sampling reports those of 1)."""
    temperature = config.rollout.temperature or 1.0
    return model(
        batch.input_ids, batch.position_ids, batch.loss_positions, batch.predictors, batch.packing, temperature
    )


def anchors_at_current(config: Config) -> bool:
    """Whether the proximal policy is the one in hand, whose log-probs the training forward gives anyway."""
    return proximal_source(config.loss, config.learner.updates_per_batch) == "current"


def proximal_logprobs(
    config: Config, model: PolicyModel, packed: Sequence[Sequence[MicroBatch]]
) -> list[list[Tensor | None]]:
    """Log-probs of every micro-batch before the first update, where the loss is anchored there; else None."""
    if proximal_source(config.loss, config.learner.updates_per_batch) != "recompute":
        return [[None] * len(batches) for batches in packed]
    with torch.no_grad():
        return [[score(config, model, batch)[0] for batch in batches] for batches in packed]
