"""One train step on rows: pack, forward, cross entropy of the trained tokens, backward, update; and the evaluation of
held-out rows without gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from asyncrl.errors import DataError
from asyncrl.evaluation.intervals import SHARE
from asyncrl.evaluation.table import ratios
from asyncrl.learner.batch.micro_batch import MicroBatch, pack
from asyncrl.learner.batch.plan import Budget, plan_minibatches
from asyncrl.learner.model.layout import Layout
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.learner.optimizer.update import NonFiniteGuard, apply_update, learning_rate
from asyncrl.learner.parallel.collectives import sum_over_data, text_of_rank_zero
from asyncrl.learner.roles import Roles
from asyncrl.learner.step.gradients import summed
from asyncrl.learner.step.metrics import Measured, MicroBatchMetrics
from asyncrl.learner.step.step import NO_UPDATE, of_an_update
from asyncrl.losses.diagnostics import Sums
from asyncrl.replay.protocol import Lease
from asyncrl.schema import Config
from asyncrl.sft.batches import lease_of
from asyncrl.sft.examples import Example
from asyncrl.spans import span

CHUNK_ROWS = 512
"""Number of held-out rows that are planned at a time."""


def sft_step(
    config: Config,
    roles: Roles,
    guard: NonFiniteGuard,
    lease: Lease,
    *,
    rank: int,
) -> Measured:
    """One optimizer step on the mean loss over all trained tokens of the batch; collective over the ranks.

    loss = -1/N * sum of log p(token), with N the number of trained tokens over all ranks and micro-batches.

    Returns:
        This rank's statistics; those that are equal on every rank are counted on rank 0 only.

    Raises:
        NonFiniteError: too many steps in a row were skipped.
    """
    step = lease.plan.step
    batches, tokens = micro_batches(config, roles.policy, lease, rank, roles.policy.device)
    measured = Measured()
    report = NO_UPDATE
    if batches:
        loss, measured = accumulate(roles.policy, batches, tokens)
        trained = [parameter for parameter in roles.policy.parameters() if parameter.requires_grad]
        rate = learning_rate(step, config.learner)
        with span("optimizer step"):
            report = apply_update(trained, roles.optimizer, loss=loss, lr=rate, clip_norm=config.learner.clip_norm)
        guard.observe(step + 1, report, batches)
    if rank == 0:
        measured.add(of_an_update(report, tokens))
        measured.totals["optim/nonfinite_steps"] = float(guard.skipped)
    return measured


def agree_on_rows(step: int, digest: str, device: torch.device) -> None:
    """Check that all ranks drew the same rows, since each draws by itself. Otherwise denominators would differ, a rank
    could wait for micro-batches that no other has, or rows could be trained twice or never. Collective. Raises
    DataError."""
    if text_of_rank_zero(digest, device) != digest:
        raise DataError(
            f"step {step}: this rank drew other rows than rank 0. Give all machines the same files; a class "
            "of your own must give the same row for the same number each time"
        )


def micro_batches(
    config: Config, policy: PolicyModel, lease: Lease, rank: int, device: torch.device
) -> tuple[list[MicroBatch], float]:
    """This rank's micro-batches, the same number on every rank, and the number of trained tokens of the whole batch."""
    planned = plan_minibatches(
        lease.plan,
        rank=rank,
        updates=1,
        budget=Budget.of(config.learner),
        in_rows=policy.layout is Layout.ROWS,
    )
    packed = [pack(lease, members, device) for each in planned for members in each.micro_batches]
    return packed, sum(each.denominators.tokens for each in planned)


def accumulate(model: PolicyModel, batches: Sequence[MicroBatch], tokens: float) -> tuple[Tensor, Measured]:
    """Accumulate the gradients of all micro-batches; with the last one they are summed over the ranks.

    Returns:
        This rank's share of the loss, and its statistics.
    """
    told: list[MicroBatchMetrics] = []

    def loss_of(batch: MicroBatch) -> Tensor:
        with span("forward"):
            logprobs, entropy = model(batch, 1.0)
        told.append(MicroBatchMetrics(Sums(means={"policy/entropy": (entropy.sum(), batch.loss_mask.sum())})))
        return -logprobs.sum() / tokens  # the log-prob is 0 at all other positions

    return summed(model, batches, loss_of), Measured.of(*told)


@torch.no_grad()
def evaluate(
    config: Config, policy: PolicyModel, examples: Sequence[Example], *, rank: int, world: int, device: torch.device
) -> dict[str, float]:
    """Mean loss per trained token of held-out rows, and the share of tokens that greedy decoding would predict given
    the correct preceding tokens, with intervals over the rows. Collective; the same result on every rank."""
    sums = torch.zeros((len(examples), 3), dtype=torch.float64, device=device)
    for start, lease in _chunks(examples, rank, world):
        batches, _ = micro_batches(config, policy, lease, rank, device)
        for batch in batches:
            logprobs, likeliest, _ = policy.judge(batch)
            found = torch.stack([-logprobs.double(), likeliest.double(), torch.ones_like(logprobs).double()], dim=1)
            sums.index_add_(0, start + batch.group_ids[batch.loss_positions], found)
    policy.settle()
    loss, right, tokens = sum_over_data(sums.cpu(), device).cpu().numpy().T
    known = ratios({"loss": loss, "token_accuracy": right}, tokens, {"token_accuracy": SHARE})
    return {
        **{f"{name}{end}": value for name, each in known.items() for end, value in each.with_ends()},
        "perplexity": math.exp(min(known["loss"].value, 700.0)),
        "tokens": float(tokens.sum()),
        "count": float(len(examples)),
    }


def _chunks(examples: Sequence[Example], rank: int, world: int) -> Iterator[tuple[int, Lease]]:
    for start in range(0, len(examples), CHUNK_ROWS):
        yield start, lease_of(0, examples[start : start + CHUNK_ROWS], rank=rank, world=world)
