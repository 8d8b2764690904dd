"""Accumulates the gradients of the policy over the micro-batches of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.learner.batch.micro_batch import MicroBatch
from asyncrl.learner.model.packed import PackedModel, set_gradient_sync
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.learner.parallel.collectives import data_ranks, gather_over_data
from asyncrl.learner.step.metrics import Measured, MicroBatchMetrics
from asyncrl.learner.step.scoring import anchor_of, score_with_topk
from asyncrl.losses import Denominators, LossInputs, policy_loss
from asyncrl.losses.inputs import Bounds, Kept
from asyncrl.losses.kept import first_pass
from asyncrl.schema import Config
from asyncrl.settings.loss.meaning import needs_first_pass
from asyncrl.spans import span


@dataclass(slots=True, kw_only=True)
class Accumulated:
    """Sums over the micro-batches of an optimizer step so far. The gradients themselves are in the model."""

    loss: Tensor
    """This rank's share of the loss."""
    measured: Measured = field(default_factory=Measured)
    told: list[MicroBatchMetrics] = field(default_factory=list)
    """Numbers still on the device that belong into `measured`."""


def accumulate(
    config: Config, model: PolicyModel, batches: Sequence[MicroBatch], denominators: Denominators
) -> tuple[Tensor, Measured]:
    """Accumulate the gradients of all micro-batches of a minibatch. They are reduced over the ranks with the last
    one."""
    kept = kept_of(config, model, batches) if needs_first_pass(config.loss) else None
    sums = Accumulated(loss=torch.zeros((), device=batches[0].input_ids.device))
    for i, batch in enumerate(batches, 1):
        add_gradients(config, model, batch, denominators, sums, last=i == len(batches), kept=kept)
    sums.measured.add(Measured.of(*sums.told))
    return sums.loss, sums.measured


def add_gradients(
    config: Config,
    model: PolicyModel,
    batch: MicroBatch,
    denominators: Denominators,
    sums: Accumulated,
    *,
    last: bool,
    kept: Kept | None = None,
) -> None:
    """Add the gradients of one micro-batch to those in the model, and its numbers to `sums`."""
    set_gradient_sync(model, last)
    with span("forward", groups=batch.groups):
        inputs = loss_inputs(config, model, batch)
        out = policy_loss(inputs, config.loss, denominators, kept=kept)
    told = gradients_told(inputs)
    with span("backward", groups=batch.groups):
        backward(out.loss)
    sums.loss = sums.loss + out.loss.detach()
    for gradient in told:
        out.sums.means["loss/zero_gradient_share"] = ((gradient == 0) & batch.loss_mask).sum(), batch.loss_mask.sum()
    if model.replay is not None and (choices := model.replay.told()) is not None:
        out.sums.means["router/changed"] = choices
    sums.told.append(MicroBatchMetrics(out.sums, out.parts))
    sequences = float(len(batch.packing.lengths)) if len(batch.loss_positions) else 0.0
    known = {"completion/truncated": (float(batch.truncated), sequences)}
    if batch.support is not None:
        sizes = batch.support.drawn_from
        known["completion/support_mean"] = float(sizes.sum()), float(len(sizes))
    sums.measured.add(Measured(ratios=known))


def gradients_told(inputs: LossInputs) -> list[Tensor]:
    """A list to which the next backward appends the gradient at each token's log-prob. A token whose gradient is 0 (no
    advantage, clipped, rejected) was generated and computed for nothing."""
    told: list[Tensor] = []
    if inputs.learner_logprobs.requires_grad:
        inputs.learner_logprobs.register_hook(told.append)
    return told


@torch.no_grad()
def kept_of(config: Config, model: PolicyModel, batches: Sequence[MicroBatch]) -> Kept:
    """What the loss must know of a whole minibatch, from an additional forward: no gradient can be computed before the
    denominator of its tokens is known. Collective."""
    inputs = [loss_inputs(config, model, batch) for batch in batches]
    model.settle()
    return first_pass(inputs, config.loss, gather_over_data)


def loss_inputs(config: Config, model: PolicyModel, batch: MicroBatch) -> LossInputs:
    logprobs, entropy, topk = score_with_topk(config, model, batch)
    assert batch.advantages is not None
    groups = 1 + max((g for g, _ in batch.members), default=0)
    return LossInputs(
        learner_logprobs=logprobs,
        behavior_logprobs=batch.behavior_logprobs,
        advantages=batch.advantages,
        loss_mask=batch.loss_mask,
        sequence_ids=batch.sequence_ids,
        group_ids=batch.group_ids,
        proximal_logprobs=logprobs.detach() if anchor_of(config) == "current" else batch.proximal_logprobs,
        ref_logprobs=batch.ref_logprobs,
        entropy=entropy,
        staleness=batch.staleness,
        group_tokens=batch.group_tokens,
        topk=topk,
        bounds=Bounds(sequences=max(1, len(batch.members)), groups=groups, ages=batch.ages),
    )


def summed(model: PackedModel, batches: Sequence[MicroBatch], loss_of: Callable[[MicroBatch], Tensor]) -> Tensor:
    """Accumulate the gradients of the losses of all micro-batches; with the last one they are summed over the ranks.
    Returns the sum of this rank's losses."""
    total = torch.zeros((), device=batches[0].input_ids.device)
    for i, batch in enumerate(batches):
        set_gradient_sync(model, i == len(batches) - 1)
        loss = loss_of(batch)
        with span("backward", groups=batch.groups):
            backward(loss)
        total = total + loss.detach()
    return total


def backward(loss: Tensor) -> None:
    """Backward of the loss times the number of ranks: the denominators already count all ranks, so gradients must be
    summed over the ranks, but FSDP averages them."""
    if loss.requires_grad:
        (loss * data_ranks()).backward()
