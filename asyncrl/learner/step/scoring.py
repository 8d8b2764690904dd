"""Forward passes without gradient, before the first update on a batch. Advantages and losses are computed from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.data.vocabulary import refuse_unknown
from asyncrl.learner.batch.micro_batch import MicroBatch, pack
from asyncrl.learner.batch.plan import Member
from asyncrl.learner.model.packed import PackedModel
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.learner.roles import Roles
from asyncrl.losses import TopK
from asyncrl.replay.protocol import Lease
from asyncrl.schema import Config
from asyncrl.settings.loss.meaning import proximal_source, required_inputs
from asyncrl.spans import span
from asyncrl.types import SUPPORT_IDS


def score(config: Config, model: PolicyModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """learner_logprobs and entropy, [T] each, at the sampling temperature (at 1 for greedy sampling), over what each
    token was drawn from: with truncated sampling all policies, also the reference, are renormalised over it."""
    logprobs, entropy, *_ = _forward(config, model, batch)
    return logprobs, entropy


def score_with_topk(config: Config, model: PolicyModel, batch: MicroBatch) -> tuple[Tensor, Tensor, TopK | None]:
    """`score`, and with `loss.centering` the log-probs of the most likely tokens that the engine recorded."""
    if batch.topk_ids is None or batch.topk_logprobs is None:
        return *score(config, model, batch), None
    logprobs, entropy, likeliest = _forward(config, model, batch, batch.topk_ids)
    return logprobs, entropy, TopK(batch.loss_positions, likeliest, batch.topk_logprobs)


def _forward(
    config: Config, model: PolicyModel, batch: MicroBatch, candidates: Tensor | None = None
) -> tuple[Tensor, ...]:
    return model(batch, config.rollout.temperature or 1.0, batch.support, candidates)


def anchor_of(config: Config) -> str:
    """Source of the proximal log-probs: `none`, `current`, `recompute` (see `proximal_source`) or `average`."""
    source = proximal_source(config.loss, config.learner.optimizer_steps)
    return "average" if source != "none" and config.learner.proximal_ema > 0 else source


def needs_current(config: Config) -> bool:
    """Whether the policy scores the batch in a separate pass before it is trained on it."""
    advantage = config.advantage
    return anchor_of(config) == "recompute" or advantage.uses_ratio or advantage.kl_coef > 0


def needs_topk(config: Config) -> bool:
    """Whether the loss uses the most likely tokens that the engine recorded."""
    return "topk" in required_inputs(config.loss)


def with_scores(config: Config, roles: Roles, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Fill in `current_logprobs`, `proximal_logprobs`, `ref_logprobs` (unless they came with the trajectories) and
    `values` if the settings need them.

    Collective over the ranks: each model runs over all micro-batches before the next model does.
    """
    nothing: list[Tensor | None] = [None] * len(batches)

    def logprobs_under(model: PolicyModel) -> Sequence[Tensor | None]:
        return _pass(model, lambda batch: score(config, model, batch)[0], batches)

    anchor = anchor_of(config)
    current = logprobs_under(roles.policy) if needs_current(config) else nothing
    proximal = current if anchor == "recompute" else nothing
    if anchor == "average":
        assert roles.average is not None
        proximal = logprobs_under(roles.average)
    came = [batch.ref_logprobs for batch in batches]
    reference = came if roles.reference is None else logprobs_under(roles.reference)
    if roles.base_is_reference:
        assert roles.policy.adapters is not None
        with roles.policy.adapters.off():
            reference = _pass(roles.policy, lambda batch: score(config, roles.policy, unrouted(batch))[0], batches)
    values: Sequence[Tensor | None] = nothing
    if roles.critic is not None:
        critic = roles.critic.model
        values = _pass(critic, critic, batches)
    return [
        replace(batch, current_logprobs=now, proximal_logprobs=prox, ref_logprobs=ref, values=value)
        for batch, now, prox, ref, value in zip(batches, current, proximal, reference, values, strict=True)
    ]


def scored_batches(
    config: Config, roles: Roles, lease: Lease, members: Sequence[Sequence[Member]], device: torch.device
) -> list[MicroBatch]:
    """Pack and score micro-batches of these trajectories. Collective."""
    wanted = {"reference": roles.reference_comes, "topk": needs_topk(config)}
    for key, (_, rows) in roles.smaller_vocabularies(config).items():
        refuse_unknown(key, rows, _ids_in(lease, members))
    with span("pack"):
        packed = [pack(lease, each, device, **wanted, routers=roles.policy.routers) for each in members]
    with span("score"):
        return with_scores(config, roles, packed)


def _ids_in(lease: Lease, members: Sequence[Sequence[Member]]) -> Iterator[NDArray[np.int32]]:
    """Tokens of these trajectories, and those from which they were drawn."""
    for member in itertools.chain.from_iterable(members):
        trajectory = lease.trajectories[member]
        yield trajectory.token_ids
        if SUPPORT_IDS in trajectory.extras:
            yield trajectory.extras[SUPPORT_IDS]


def unrouted(batch: MicroBatch) -> MicroBatch:
    """The batch without recorded experts, for the reference: it is a different policy, whose routers choose
    themselves."""
    return replace(batch, packing=replace(batch.packing, routing=None))


@torch.no_grad()
def _pass(model: PackedModel, forward: Callable[[MicroBatch], Tensor], batches: Sequence[MicroBatch]) -> list[Tensor]:
    results = [forward(batch) for batch in batches]
    model.settle()
    return results
